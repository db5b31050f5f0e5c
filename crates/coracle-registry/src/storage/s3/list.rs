//! The two answers of the S3 API that are read: a list of keys, and the id of an upload in parts. Pure.

use quick_xml::Reader;
use quick_xml::events::Event;

/// A page of keys.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Page {
    pub(super) keys: Vec<(String, u64)>,
    /// Where the next one begins.
    pub(super) next: Option<String>,
}

/// Reads a page of ListObjectsV2. `None` when it does not parse.
pub(super) fn page(xml: &[u8]) -> Option<Page> {
    let mut page = Page::default();
    let (mut key, mut size, mut more) = (None, None, false);
    each(xml, |path, text| match path {
        ["ListBucketResult", "Contents", "Key"] => key = Some(text),
        ["ListBucketResult", "Contents", "Size"] => size = text.parse().ok(),
        ["ListBucketResult", "Contents"] => page.keys.extend(key.take().zip(size.take())),
        ["ListBucketResult", "NextContinuationToken"] => page.next = Some(text),
        ["ListBucketResult", "IsTruncated"] => more = text == "true",
        _ => {}
    })?;
    page.next = page.next.filter(|_| more);
    Some(page)
}

/// Reads the id of CreateMultipartUpload.
pub(super) fn upload_id(xml: &[u8]) -> Option<String> {
    let mut id = None;
    each(xml, |path, text| {
        if path == ["InitiateMultipartUploadResult", "UploadId"] {
            id = Some(text);
        }
    })?;
    id
}

/// Is the answer an error, which CompleteMultipartUpload says with a good status, too?
pub(super) fn is_error(xml: &[u8]) -> bool {
    let mut error = false;
    let read = each(xml, |path, _| error |= path.first() == Some(&"Error"));
    error || read.is_none()
}

/// Calls `heard` at the end of each element, with its path and its own text.
fn each(xml: &[u8], mut heard: impl FnMut(&[&str], String)) -> Option<()> {
    let mut reader = Reader::from_reader(xml);
    let (mut open, mut text) = (Vec::<String>::new(), String::new());
    loop {
        match reader.read_event().ok()? {
            Event::Start(tag) => {
                open.push(std::str::from_utf8(tag.local_name().as_ref()).ok()?.to_owned());
                text.clear();
            }
            Event::Text(piece) => text.push_str(&piece.decode().ok()?),
            Event::GeneralRef(name) => match name.resolve_char_ref().ok()? {
                Some(plain) => text.push(plain),
                None => text.push(match &*name.decode().ok()? {
                    "amp" => '&',
                    "lt" => '<',
                    "gt" => '>',
                    "quot" => '"',
                    "apos" => '\'',
                    _ => return None,
                }),
            },
            Event::End(_) => {
                let path: Vec<&str> = open.iter().map(String::as_str).collect();
                heard(&path, std::mem::take(&mut text));
                open.pop()?;
            }
            Event::Eof => return open.is_empty().then_some(()),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_read() {
        let xml = br#"<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">
            <Name>b</Name><IsTruncated>true</IsTruncated><NextContinuationToken>a&amp;b</NextContinuationToken>
            <Contents><Key>x/1</Key><ETag>&#34;e&quot;</ETag><Size>10</Size><Owner><ID>o</ID></Owner></Contents>
            <Contents><Size>0</Size><Key>x/2</Key></Contents></ListBucketResult>"#;
        let want = Page { keys: vec![("x/1".into(), 10), ("x/2".into(), 0)], next: Some("a&b".into()) };
        assert_eq!(page(xml), Some(want));
        assert_eq!(
            page(b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"),
            Some(Page::default())
        );
        for broken in ["<ListBucketResult>", "no xml <", "<a></b>"] {
            assert_eq!(page(broken.as_bytes()), None, "{broken}");
        }
    }

    #[test]
    fn an_upload_and_an_error_are_told_apart() {
        let made = b"<InitiateMultipartUploadResult><Bucket>b</Bucket><UploadId>u-1</UploadId></InitiateMultipartUploadResult>";
        assert_eq!(upload_id(made).as_deref(), Some("u-1"));
        assert!(is_error(b"<Error><Code>InternalError</Code></Error>"));
        assert!(!is_error(b"<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>"));
    }
}
