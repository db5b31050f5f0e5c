//! `coracle doctor --cluster`.

use coracle_api::keys::SYSTEM_NAMESPACE;
use coracle_cli::cli::Global;
use coracle_cli::error::Failure;
use coracle_install::doctor::{Finding, State, examine};
use coracle_reconcile::{Clock, WallTime as _};

use super::{Check, CheckResult};

/// Examines the cluster that the flags select.
pub(super) async fn checks(global: &Global) -> Result<Vec<Check>, Failure> {
    let client = coracle_cli::connect(global).await?;
    let namespace = global.namespace.as_deref().unwrap_or(SYSTEM_NAMESPACE);
    let findings = examine(&client, namespace, Clock::system().timestamp()).await;
    Ok(findings.into_iter().map(check).collect())
}

fn check(finding: Finding) -> Check {
    let result = match finding.state {
        State::Good => CheckResult::Good,
        State::Limited => CheckResult::Limited,
        State::Broken => CheckResult::Missing,
    };
    Check::new(finding.check, result, finding.detail, finding.help)
}
