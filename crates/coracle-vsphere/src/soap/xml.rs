//! Reading and writing of XML elements. Names are compared by namespace and local name, never by a prefix that a server chose.

use std::fmt::Write as _;

use quick_xml::{
    NsReader, XmlVersion,
    escape::{escape, resolve_predefined_entity},
    events::{BytesStart, Event},
    name::{Namespace, ResolveResult},
};

use crate::{Fault, Object};

/// XML Schema instance, the namespace of `xsi:type`.
const XSI: &[u8] = b"http://www.w3.org/2001/XMLSchema-instance";
/// Deepest nesting that is accepted.
const DEPTH_MAX: usize = 64;

/// Parsed element.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Node {
    /// Local name.
    pub(crate) name: String,
    /// Local part of `xsi:type`; empty if absent.
    pub(crate) xsi: String,
    /// Attribute `type` of a reference; empty if absent.
    pub(crate) object_kind: String,
    /// Text content.
    pub(crate) text: String,
    /// Child elements.
    pub(crate) children: Vec<Node>,
}

impl Node {
    /// First child of the name.
    pub(crate) fn get(&self, name: &str) -> Option<&Node> {
        self.children.iter().find(|c| c.name == name)
    }

    /// All children of the name.
    pub(crate) fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Node> {
        self.children.iter().filter(move |c| c.name == name)
    }

    /// Text of the first child of the name; empty if there is none.
    pub(crate) fn text_of(&self, name: &str) -> &str {
        self.get(name).map_or("", |n| n.text.as_str())
    }

    /// Converts this element to an object reference.
    pub(crate) fn object(&self) -> Option<Object> {
        let there = !self.object_kind.is_empty() && !self.text.is_empty();
        there.then(|| Object::new(&self.object_kind, &self.text))
    }
}

/// Parses one document.
///
/// # Errors
/// The reason why it is not well-formed or not accepted.
pub(crate) fn parse(text: &str) -> Result<Node, String> {
    let mut reader = NsReader::from_str(text);
    let mut open = vec![Node::default()];
    loop {
        let event = reader.read_event().map_err(|e| e.to_string())?;
        match event {
            Event::Start(start) => {
                if open.len() >= DEPTH_MAX {
                    return Err(format!("nested deeper than {DEPTH_MAX}"));
                }
                open.push(start_element(&reader, &start)?);
            }
            Event::Empty(start) => {
                let node = start_element(&reader, &start)?;
                open_element(&mut open)?.children.push(node);
            }
            Event::End(_) => {
                let node = open.pop().ok_or("more ends than beginnings")?;
                open_element(&mut open)?.children.push(node);
            }
            Event::Text(part) => {
                open_element(&mut open)?.text.push_str(&part.xml10_content().map_err(|e| e.to_string())?)
            }
            Event::CData(part) => {
                open_element(&mut open)?.text.push_str(&part.decode().map_err(|e| e.to_string())?)
            }
            Event::GeneralRef(reference) => {
                let name = reference.decode().map_err(|e| e.to_string())?;
                let text = &mut open_element(&mut open)?.text;
                match reference.resolve_char_ref().map_err(|e| e.to_string())? {
                    Some(character) => text.push(character),
                    None => text.push_str(resolve_predefined_entity(&name).ok_or("an unknown entity")?),
                }
            }
            Event::Eof => break,
            Event::Comment(_) | Event::Decl(_) | Event::PI(_) | Event::DocType(_) => {}
        }
    }
    let mut root = open.pop().filter(|_| open.is_empty()).ok_or("it ends early")?;
    root.children.pop().ok_or_else(|| "no element".to_owned())
}

fn open_element(open: &mut [Node]) -> Result<&mut Node, String> {
    open.last_mut().ok_or_else(|| "more ends than beginnings".to_owned())
}

fn start_element(reader: &NsReader<&[u8]>, start: &BytesStart<'_>) -> Result<Node, String> {
    let local = String::from_utf8_lossy(start.local_name().as_ref()).into_owned();
    let mut node = Node { name: local, ..Node::default() };
    for attribute in start.attributes() {
        let attribute = attribute.map_err(|e| e.to_string())?;
        if attribute.key.local_name().as_ref() != b"type" {
            continue;
        }
        let value = attribute.normalized_value(XmlVersion::Implicit1_0).map_err(|e| e.to_string())?;
        match reader.resolver().resolve_attribute(attribute.key).0 {
            ResolveResult::Bound(Namespace(XSI)) => {
                node.xsi = value.rsplit(':').next().unwrap_or_default().to_owned();
            }
            ResolveResult::Unbound => node.object_kind = value.into_owned(),
            ResolveResult::Bound(_) | ResolveResult::Unknown(_) => {}
        }
    }
    Ok(node)
}

/// Fault of an answer: the type of the first element of `detail`, and its fields.
pub(crate) fn fault_of(body: &Node) -> Option<Fault> {
    let fault = body.get("Fault")?;
    let detail = fault.get("detail").and_then(|d| d.children.first());
    let kind = detail.map(|d| if d.xsi.is_empty() { d.name.trim_end_matches("Fault") } else { &d.xsi });
    Some(Fault {
        kind: kind.unwrap_or("RuntimeFault").to_owned(),
        message: fault.text_of("faultstring").to_owned(),
        fields: detail.map(fields).unwrap_or_default(),
    })
}

/// Fault of a task, from `info.error`.
pub(crate) fn task_fault(error: &Node) -> Fault {
    let fault = error.get("fault");
    Fault {
        kind: fault.map_or_else(|| "RuntimeFault".to_owned(), |f| f.xsi.clone()),
        message: error.text_of("localizedMessage").to_owned(),
        fields: fault.map(fields).unwrap_or_default(),
    }
}

fn fields(node: &Node) -> std::collections::BTreeMap<String, String> {
    let leaves = node.children.iter().filter(|c| c.children.is_empty() && !c.text.is_empty());
    leaves.map(|c| (c.name.clone(), c.text.clone())).collect()
}

/// Element with child elements.
pub(crate) fn el(name: &str, inner: impl AsRef<str>) -> String {
    format!("<{name}>{}</{name}>", inner.as_ref())
}

/// Element of a subtype, with `xsi:type`.
pub(crate) fn typed(name: &str, kind: &str, inner: impl AsRef<str>) -> String {
    format!("<{name} xsi:type=\"{kind}\">{}</{name}>", inner.as_ref())
}

/// Element with a text or a number.
pub(crate) fn text(name: &str, value: impl std::fmt::Display) -> String {
    el(name, escape(value.to_string()))
}

/// An element that refers to an object.
pub(crate) fn reference(name: &str, object: &Object) -> String {
    format!("<{name} type=\"{}\">{}</{name}>", escape(&object.kind), escape(&object.id))
}

/// SOAP envelope of a method call.
pub(crate) fn envelope(method: &str, this: &Object, arguments: &str) -> String {
    let mut out = String::with_capacity(arguments.len() + 400);
    // Writing to a `String` does not fail.
    let _ = write!(
        out,
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\
         <soapenv:Envelope xmlns:soapenv=\"http://schemas.xmlsoap.org/soap/envelope/\" \
         xmlns:xsd=\"http://www.w3.org/2001/XMLSchema\" \
         xmlns:xsi=\"http://www.w3.org/2001/XMLSchema-instance\"><soapenv:Body>\
         <{method} xmlns=\"urn:vim25\">{}{arguments}</{method}></soapenv:Body></soapenv:Envelope>",
        reference("_this", this),
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_found_by_namespace_and_not_by_prefix() {
        for prefix in ["xsi", "_XMLSchema-instance", "q"] {
            let text = format!(
                "<a xmlns=\"urn:vim25\"><val xmlns:{prefix}=\"http://www.w3.org/2001/XMLSchema-instance\" \
                 {prefix}:type=\"ManagedObjectReference\" type=\"Folder\">group-[v3] &amp; &#x41;</val></a>"
            );
            let node = parse(&text).unwrap();
            let val = node.get("val").unwrap();
            assert_eq!(val.xsi, "ManagedObjectReference");
            assert_eq!(val.object(), Some(Object::new("Folder", "group-[v3] & A")));
        }
    }

    #[test]
    fn fault_is_identified_by_type_and_not_by_text() {
        let text = "<Envelope><Body><Fault><faultcode>x</faultcode><faultstring>Es gibt schon …</faultstring><detail>\
            <DuplicateNameFault xmlns:xsi=\"http://www.w3.org/2001/XMLSchema-instance\" xsi:type=\"DuplicateName\">\
            <name>vm-a</name><object type=\"VirtualMachine\">vm-7</object></DuplicateNameFault></detail></Fault></Body></Envelope>";
        let fault = fault_of(parse(text).unwrap().get("Body").unwrap()).unwrap();
        assert_eq!((fault.kind.as_str(), fault.fields["name"].as_str()), ("DuplicateName", "vm-a"));
    }

    #[test]
    fn broken_documents_are_refused_without_a_panic() {
        for text in ["", "<a>", "</a>", "<a></b>", "<a>&nbsp;</a>", "text", &"<a>".repeat(100)] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert_eq!(escape("a<b>&\"'"), "a&lt;b&gt;&amp;&quot;&apos;");
    }
}
