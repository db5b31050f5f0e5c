//! Objects of an installation in a cluster. They are built once, as values, and written in two forms: for kustomize, and as a
//! Helm chart. `cargo xtask codegen` writes both to `deploy/`; tests compare them by Helm and kubectl, and apply them.
//!
//! ```text
//!  base, options ─▶ objects ─┬─▶ kustomize: base, components, default
//!                            └─▶ chart: the same objects, with expressions where a value decides
//! ```

mod base;
mod chart;
mod dashboards;
pub mod doctor;
mod extension_api;
mod hook;
mod kustomize;
mod monitoring;
mod objects;
mod options;
pub mod uninstall;

/// Image of the manifests; overlays and values of the chart replace it.
pub const IMAGE: &str = "localhost/coracle/coracle:0.1.0";

/// Returns the files below `deploy/`: path and text.
///
/// # Panics
/// Never: every value is built here and can be written as YAML.
#[must_use]
pub fn files() -> Vec<(String, String)> {
    let mut files = kustomize::files();
    files.extend(chart::files());
    files.extend(dashboards::files());
    files
}

/// Returns the definitions of all kinds as files: name and YAML.
pub(crate) fn definitions() -> Vec<(String, String)> {
    coracle_api::crd_files().expect("a definition of ours is YAML")
}
