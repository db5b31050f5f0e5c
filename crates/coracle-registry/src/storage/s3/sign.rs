//! AWS Signature Version 4 for the S3 API ("Authenticating Requests: Using the Authorization Header"). Pure.

use aws_lc_rs::{digest, hmac};

/// What is signed of a request. Paths and queries have unreserved characters and slashes alone, or are encoded already.
#[derive(Debug)]
pub(super) struct Request<'a> {
    pub(super) method: &'a str,
    pub(super) host: &'a str,
    pub(super) path: &'a str,
    /// Sorted by name, encoded.
    pub(super) query: &'a str,
    /// Names in lower case; sorted with the others here.
    pub(super) headers: &'a [(&'a str, &'a str)],
    /// SHA-256 of the body, in hex.
    pub(super) body: &'a str,
    /// `YYYYMMDDThhmmssZ`.
    pub(super) at: &'a str,
}

/// For whom, and where.
#[derive(Clone)]
pub(super) struct Key {
    pub(super) access: String,
    pub(super) secret: String,
    pub(super) region: String,
}

/// The value of the header `authorization`.
pub(super) fn authorization(request: &Request<'_>, key: &Key) -> String {
    let mut headers: Vec<(&str, &str)> = request.headers.to_vec();
    headers.extend([
        ("host", request.host),
        ("x-amz-content-sha256", request.body),
        ("x-amz-date", request.at),
    ]);
    headers.sort_unstable();
    let names: Vec<&str> = headers.iter().map(|(name, _)| *name).collect();
    let names = names.join(";");
    let lines: String = headers.iter().map(|(name, value)| format!("{name}:{}\n", value.trim())).collect();
    let Request { method, path, query, body, at, .. } = request;
    let canonical = format!("{method}\n{path}\n{query}\n{lines}\n{names}\n{body}");
    let day = at.get(..8).unwrap_or_default();
    let scope = format!("{day}/{}/s3/aws4_request", key.region);
    let text = format!("AWS4-HMAC-SHA256\n{at}\n{scope}\n{}", sha256(canonical.as_bytes()));
    let mut secret = format!("AWS4{}", key.secret).into_bytes();
    for part in [day, &key.region, "s3", "aws4_request"] {
        secret = mac(&secret, part);
    }
    let signature = hex::encode(mac(&secret, &text));
    format!("AWS4-HMAC-SHA256 Credential={}/{scope},SignedHeaders={names},Signature={signature}", key.access)
}

fn mac(key: &[u8], text: &str) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes()).as_ref().to_vec()
}

/// In hex.
pub(super) fn sha256(bytes: &[u8]) -> String {
    hex::encode(digest::digest(&digest::SHA256, bytes))
}

/// Percent-encodes all but unreserved characters (RFC 3986), as the signature wants queries.
pub(super) fn encode(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b'~');
    text.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example "GET Object" of the document.
    #[test]
    fn the_documents_example_is_signed_as_it_says() {
        let key = Key {
            access: "AKIAIOSFODNN7EXAMPLE".into(),
            secret: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".into(),
            region: "us-east-1".into(),
        };
        let request = Request {
            method: "GET",
            host: "examplebucket.s3.amazonaws.com",
            path: "/test.txt",
            query: "",
            headers: &[("range", "bytes=0-9")],
            body: &sha256(b""),
            at: "20130524T000000Z",
        };
        let signed = authorization(&request, &key);
        assert!(signed.contains("SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,"), "{signed}");
        let want = "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41";
        assert!(signed.ends_with(want), "{signed}");
    }

    #[test]
    fn queries_are_encoded() {
        assert_eq!(encode("epoch/a b=c~d"), "epoch%2Fa%20b%3Dc~d");
    }
}
