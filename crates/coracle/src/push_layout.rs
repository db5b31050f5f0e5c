//! Pushes the image of an OCI layout to a registry, which `cargo xtask package --push` uses.

use std::sync::Arc;

use coracle_cli::cli::PushLayoutArgs;
use coracle_cli::error::Failure;
use coracle_cli::{output, registries};
use coracle_image::{PushOptions, Source, Store, StoreOptions};
use coracle_oci::{NoProgress, Reference};
use miette::{IntoDiagnostic as _, WrapErr as _};

/// Pushes the image and prints the digest of its manifest.
pub(crate) async fn run(args: PushLayoutArgs) -> miette::Result<u8> {
    let target: Reference = args.reference.parse().map_err(|error| Failure::usage(format!("{error}")))?;
    // The store verifies every digest.
    let scratch = tempfile::tempdir().into_diagnostic()?;
    let options = StoreOptions {
        registries: registries::load_with_warnings(&args.registries)?,
        ..StoreOptions::default()
    };
    let store = Store::open(scratch.path().join("images"), options).into_diagnostic()?;
    let source = Source::OciDir { dir: args.layout.clone(), tag: None };
    let read = store.import(&source, Some(&target), Arc::new(NoProgress)).await.into_diagnostic();
    read.wrap_err_with(|| format!("read the image of {}", args.layout.display()))?;
    let pushed = store.push(&target, &target, &PushOptions::default(), Arc::new(NoProgress)).await;
    let report = pushed.into_diagnostic().wrap_err_with(|| format!("push {target}"))?;
    output::write(&format!("{}\n", report.digest))?;
    Ok(0)
}
