//! Runtime handlers, which the RuntimeClass of a pod selects. Pure.

use crate::CriOptions;
use crate::refusal::Refusal;

/// Kind of a pod's containers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Containers in the one VM of the pod.
    #[default]
    Containers,
    /// A VM of its own that boots a disk image.
    Disk,
}

/// Runtime handler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Handler {
    /// Name in the RuntimeClass; empty: handler of pods without a RuntimeClass.
    pub(crate) name: String,
    pub(crate) mode: Mode,
    /// Name of the driver; empty: the node's default.
    pub(crate) driver: String,
}

/// Returns all handlers of a node with these drivers. The handler of pods without a RuntimeClass is the first. Of two handlers
/// with the same name, the first one applies.
pub(crate) fn all(options: &CriOptions, drivers: &[&str]) -> Vec<Handler> {
    let handler = |name: String, mode, driver: &str| Handler { name, mode, driver: driver.to_owned() };
    let containers = options.handlers.iter().map(|name| handler(name.clone(), Mode::Containers, ""));
    let disks = options.disk_handlers.iter().map(|name| handler(name.clone(), Mode::Disk, ""));
    let of_drivers =
        drivers.iter().map(|driver| handler(format!("coracle-{driver}"), Mode::Containers, driver));
    let mut all = vec![handler(String::new(), Mode::Containers, "")];
    for new in containers.chain(disks).chain(of_drivers) {
        if all.iter().all(|known| known.name != new.name) {
            all.push(new);
        }
    }
    all
}

/// Returns the handler with this name.
///
/// # Errors
/// [`Refusal::Invalid`] with the existing names.
pub(crate) fn find<'a>(all: &'a [Handler], name: &str) -> Result<&'a Handler, Refusal> {
    all.iter().find(|handler| handler.name == name).ok_or_else(|| {
        let known: Vec<_> =
            all.iter().map(|handler| handler.name.as_str()).filter(|n| !n.is_empty()).collect();
        Refusal::invalid("runtime handler", format!("\"{name}\" is not one of: {}", known.join(", ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handlers_table() {
        let options = CriOptions::default();
        let all = all(&options, &["qemu", "disk"]);
        for (name, want) in [
            ("", Some((Mode::Containers, ""))),
            ("coracle", Some((Mode::Containers, ""))),
            ("coracle-disk", Some((Mode::Disk, ""))),
            ("macvm", Some((Mode::Disk, ""))),
            ("coracle-qemu", Some((Mode::Containers, "qemu"))),
            ("coracle-firecracker", None),
            ("runc", None),
        ] {
            let found = find(&all, name).ok().map(|handler| (handler.mode, handler.driver.as_str()));
            assert_eq!(found, want, "{name:?}");
        }
        let refused = find(&all, "runc").unwrap_err().to_string();
        assert!(
            refused.contains("\"runc\" is not one of: coracle, coracle-disk, macvm, coracle-qemu"),
            "{refused}"
        );
    }
}
