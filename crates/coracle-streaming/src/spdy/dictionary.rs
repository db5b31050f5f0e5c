//! Preset dictionary of SPDY/3 header blocks (SPDY draft 3, section 2.6.10.1).

/// Length of the dictionary.
pub(crate) const LENGTH: usize = 1423;

/// Strings that are prefixed with their length (u32, big-endian).
const PREFIXED: &str = concat!(
    "options|head|post|put|delete|trace|accept|accept-charset|accept-encoding|accept-language|accept-ranges|age|allow|",
    "authorization|cache-control|connection|content-base|content-encoding|content-language|content-length|",
    "content-location|content-md5|content-range|content-type|date|etag|expect|expires|from|host|if-match|",
    "if-modified-since|if-none-match|if-range|if-unmodified-since|last-modified|location|max-forwards|pragma|",
    "proxy-authenticate|proxy-authorization|range|referer|retry-after|server|te|trailer|transfer-encoding|upgrade|",
    "user-agent|vary|via|warning|www-authenticate|method|get|status|200 OK|version|HTTP/1.1|url|public|set-cookie|",
    "keep-alive|origin|",
);

/// Text without length prefixes.
const PLAIN: &str = concat!(
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505",
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized",
    "403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented503 Service Unavailable",
    "Jan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMT",
    "chunked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,",
    "text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0.",
);

/// The dictionary.
pub(crate) const DICTIONARY: [u8; LENGTH] = build();

/// Adler-32 checksum of the dictionary, which is in the header of a zlib stream.
pub(crate) const ADLER: u32 = 0xE3C6_A7C2;

// A wrong dictionary fails to compile.
const _: () = assert!(adler32(&DICTIONARY) == ADLER);

const fn build() -> [u8; LENGTH] {
    let mut out = [0; LENGTH];
    let (prefixed, plain) = (PREFIXED.as_bytes(), PLAIN.as_bytes());
    let (mut at, mut start, mut n) = (0, 0, 0);
    while n < prefixed.len() {
        if prefixed[n] == b'|' {
            // Only the last byte of a length is not zero.
            let (length, text) = (n - start, prefixed.split_at(start).1);
            #[expect(clippy::cast_possible_truncation, reason = "a wrong length changes the checksum")]
            copy(&[0, 0, 0, length as u8], 4, &mut out, at);
            copy(text, length, &mut out, at + 4);
            (at, start) = (at + 4 + length, n + 1);
        }
        n += 1;
    }
    copy(plain, plain.len(), &mut out, at);
    assert!(at + plain.len() == LENGTH);
    out
}

/// Copies the first `length` bytes of `text` to `out[at..]`.
const fn copy(text: &[u8], length: usize, out: &mut [u8; LENGTH], at: usize) {
    let mut n = 0;
    while n < length {
        out[at + n] = text[n];
        n += 1;
    }
}

const fn adler32(bytes: &[u8]) -> u32 {
    const BASE: u32 = 65_521;
    let (mut a, mut b, mut n) = (1_u32, 0_u32, 0);
    while n < bytes.len() {
        a = (a + bytes[n] as u32) % BASE;
        b = (b + a) % BASE;
        n += 1;
    }
    (b << 16) | a
}

#[cfg(test)]
mod tests {
    use sha2::{Digest as _, Sha256};

    use super::*;

    #[test]
    fn dictionary_has_the_published_digest() {
        let digest = hex::encode(Sha256::digest(DICTIONARY));
        assert_eq!(digest, "51d27341373f923f3cd88e1eb7162aeaa3723d7585ff2399201dc06498407f02");
    }
}
