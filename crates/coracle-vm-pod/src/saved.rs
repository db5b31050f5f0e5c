//! Saved states of VMs in a registry: one repository for each VM, by its name.

use coracle_api::cocoon::keys::{TAG_HIBERNATE, TAG_LATEST};
use coracle_oci::Reference;
use coracle_types::VmName;

use crate::step::Purpose;

/// Registry of a node for saved states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registry {
    /// Host and optional port, as in image references.
    host: String,
}

impl Registry {
    /// Returns the registry at a URL or `host[:port]`. A path is ignored.
    #[must_use]
    pub fn at(url: &str) -> Self {
        let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
        let host = rest.split('/').next().unwrap_or(rest);
        Self { host: host.to_owned() }
    }

    /// Returns host and optional port, as in image references.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the reference under which the state of a VM is saved.
    ///
    /// # Errors
    /// When the VM's name is not a valid repository name.
    pub fn saved_reference(&self, vm: &VmName, purpose: Purpose) -> Result<Reference, String> {
        let tag = match purpose {
            Purpose::Hibernation => TAG_HIBERNATE,
            Purpose::Deletion => TAG_LATEST,
        };
        self.reference(&format!("{vm}:{tag}"))
    }

    /// Parses a snapshot `repo[:tag]` of this registry, or `registry/repo[:tag]` of another one.
    ///
    /// # Errors
    /// When the text is not a reference.
    pub fn snapshot(&self, snapshot: &str) -> Result<Reference, String> {
        let first = snapshot.split('/').next().unwrap_or_default();
        let names_registry = snapshot.contains('/') && (first.contains(['.', ':']) || first == "localhost");
        if names_registry { parse(snapshot) } else { self.reference(snapshot) }
    }

    fn reference(&self, rest: &str) -> Result<Reference, String> {
        parse(&format!("{}/{rest}", self.host))
    }
}

fn parse(text: &str) -> Result<Reference, String> {
    text.parse().map_err(|error| format!("invalid reference {text:?}: {error}"))
}

/// Returns the name on this node of the snapshot `repo[:tag]`: for the tag `latest`, the repository alone.
#[must_use]
pub fn local_name(snapshot: &str) -> String {
    let (repo, tag) = match snapshot.rsplit_once(':') {
        Some((repo, tag)) if !tag.contains('/') => (repo, tag),
        _ => (snapshot, TAG_LATEST),
    };
    let plain: String =
        repo.chars().map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' }).collect();
    if tag == TAG_LATEST { plain } else { format!("{plain}-{tag}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reference_table() {
        let registry = Registry::at("http://epoch.cocoon-system.svc:8080");
        let vm: VmName = "vk-prod-demo-0".parse().unwrap();
        let saved = registry.saved_reference(&vm, Purpose::Hibernation).unwrap();
        assert_eq!(saved.to_string(), "epoch.cocoon-system.svc:8080/vk-prod-demo-0:hibernate");
        for (snapshot, want) in [
            ("base", "epoch.cocoon-system.svc:8080/base"),
            ("team/base:v2", "epoch.cocoon-system.svc:8080/team/base:v2"),
            ("registry.example/base:v2", "registry.example/base:v2"),
            ("localhost:5000/base:v2", "localhost:5000/base:v2"),
        ] {
            let got = registry.snapshot(snapshot).unwrap();
            assert!(got.to_string().starts_with(want), "{snapshot}: {got}");
        }
        assert!(registry.snapshot("Not A Reference").is_err());
        assert_eq!(Registry::at("https://r.example/path"), Registry { host: "r.example".into() });
    }

    #[test]
    fn local_name_table() {
        for (snapshot, want) in [
            ("base", "base"),
            ("base:latest", "base"),
            ("base:v2", "base-v2"),
            ("team/base", "team-base"),
            ("localhost:5000/base", "localhost-5000-base"),
        ] {
            assert_eq!(local_name(snapshot), want);
        }
    }
}
