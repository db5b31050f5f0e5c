//! Choice of the source from which a VM is started, and of the fallbacks. Pure.

use crate::HostError;

/// Available sources of a start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// The VMM that the record names is running.
    pub is_running: bool,
    /// The memory is in a file, and no guest has continued from it.
    pub is_saved: bool,
    /// The VM is never started as a clone.
    pub is_cold: bool,
    /// A template of the VM's shape exists.
    pub has_template: bool,
    /// A pooled instance of the VM's shape is claimed for it.
    pub has_pooled: bool,
}

/// Source of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Running VMM: adopt it.
    Running,
    /// Saved memory of the VM.
    Saved,
    /// Pooled instance.
    Pool,
    /// Template of the VM's shape.
    Template,
    /// Cold boot.
    Boot,
}

impl Source {
    /// Returns the name of the step that starts a VMM from this source.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Running => "adopt",
            Self::Saved => "restore",
            Self::Pool => "claim",
            Self::Template => "clone",
            Self::Boot => "boot",
        }
    }
}

/// Returns the sources in the order of attempts. Never empty.
pub fn plan_start(facts: Facts) -> Vec<Source> {
    if facts.is_running {
        return vec![Source::Running];
    }
    // A guest that does not continue from the saved memory would be another VM.
    if facts.is_saved {
        return vec![Source::Saved];
    }
    let clones = [(Source::Pool, facts.has_pooled), (Source::Template, facts.has_template)];
    let clones = clones.into_iter().filter(|(_, there)| *there && !facts.is_cold).map(|(source, _)| source);
    clones.chain([Source::Boot]).collect()
}

impl Source {
    /// Returns whether the next source is tried after this failure, because the failure concerns the source and not the VM.
    pub fn is_passed_over(self, error: &HostError) -> bool {
        match self {
            Self::Pool => true,
            Self::Template => matches!(error, HostError::Driver { .. }),
            Self::Running | Self::Saved | Self::Boot => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_table() {
        use Source::{Boot, Pool, Running, Saved, Template};
        let none = Facts::default();
        let saved = Facts { is_saved: true, ..none };
        let running = Facts { is_running: true, ..none };
        let template = Facts { has_template: true, ..none };
        let pooled = Facts { has_pooled: true, ..template };
        for (why, facts, want) in [
            ("nothing is there", none, vec![Boot]),
            ("its VMM runs: a second one would be a second VM", running, vec![Running]),
            ("cut off while it was loaded", Facts { is_saved: true, ..running }, vec![Running]),
            ("only its own memory is this VM", saved, vec![Saved]),
            ("also where a clone would be faster", Facts { is_saved: true, ..pooled }, vec![Saved]),
            ("a template", template, vec![Template, Boot]),
            ("a pooled instance, and what it was made from", pooled, vec![Pool, Template, Boot]),
            ("its template is gone", Facts { has_template: false, ..pooled }, vec![Pool, Boot]),
            ("clones are not wanted", Facts { is_cold: true, ..pooled }, vec![Boot]),
        ] {
            assert_eq!(plan_start(facts), want, "{why}");
        }
    }

    #[test]
    fn fallback_table() {
        let id = coracle_types::InstanceId::new("web", 1);
        let driver = || {
            let source =
                coracle_hypervisor::DriverError::Exited { id: id.clone(), last_words: String::new() };
            HostError::Driver { name: "web".to_owned(), source }
        };
        for (why, source, error, want) in [
            ("a pooled instance is one of many", Source::Pool, HostError::Stopping, true),
            ("a template that does not load", Source::Template, driver(), true),
            ("a full disk is full for a boot as well", Source::Template, HostError::Stopping, false),
            ("memory is never given up", Source::Saved, driver(), false),
            ("nothing is left to try", Source::Boot, driver(), false),
            ("a VMM that runs is the VM", Source::Running, driver(), false),
        ] {
            assert_eq!(source.is_passed_over(&error), want, "{why}");
        }
    }
}
