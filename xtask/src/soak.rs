//! The scenarios of the tests with the counts that promises name. One JSON line each.

use std::process::Command;

use anyhow::{Result, bail};

use crate::{run, setup, step};

struct Scenario {
    name: &'static str,
    test: &'static str,
    environment: &'static [(&'static str, &'static str)],
}

const SCENARIOS: [Scenario; 2] = [
    Scenario { name: "crash_node", test: "crash_node", environment: &[("CORACLE_CRASHES", "100")] },
    Scenario { name: "registry_kill", test: "registry_kill", environment: &[("CORACLE_KILLS", "200")] },
];

/// Runs the named scenarios, or all.
pub(crate) fn run_all(names: &[String]) -> Result<()> {
    if let Some(unknown) = names.iter().find(|n| !SCENARIOS.iter().any(|s| s.name == *n)) {
        bail!("no scenario {unknown}; there is: {}", SCENARIOS.map(|s| s.name).join(", "));
    }
    setup::ensure()?;
    for scenario in SCENARIOS {
        if names.is_empty() || names.iter().any(|n| n == scenario.name) {
            step(&format!("soak {}", scenario.name));
            let mut command = Command::new("cargo");
            command.args(["test", "--locked", "--workspace", "--test", scenario.test]);
            run(command.args(["--", "--nocapture"]).envs(scenario.environment.iter().copied()))?;
        }
    }
    Ok(())
}
