//! Seccomp profiles in the format of the OCI runtimes and of Docker. Pure.

use std::str::FromStr;

use serde::Deserialize;
use syscalls::Sysno;

use super::SeccompError;
use super::bpf::{Action, Condition, Rule, Test, assemble};
use crate::translate::security::has_capability;

/// Error number if a profile sets none (EPERM).
const EPERM: u32 = 1;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Profile {
    default_action: String,
    default_errno_ret: Option<u32>,
    #[serde(default)]
    syscalls: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    #[serde(default)]
    names: Vec<String>,
    /// System call name in the form of older profiles.
    name: Option<String>,
    action: String,
    errno_ret: Option<u32>,
    #[serde(default)]
    args: Option<Vec<Argument>>,
    #[serde(default)]
    includes: Option<Filter>,
    #[serde(default)]
    excludes: Option<Filter>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Argument {
    index: u32,
    value: u64,
    #[serde(default)]
    value_two: u64,
    op: String,
}

/// Condition under which an entry applies.
#[derive(Debug, Default, Deserialize)]
struct Filter {
    #[serde(default)]
    caps: Vec<String>,
    #[serde(default)]
    arches: Vec<String>,
}

/// Compiles a profile to the filter of a container with these capabilities. System calls that this processor does not have are
/// left out.
///
/// # Errors
/// A text that is not a profile, or contains unknown values.
pub(crate) fn compile(json: &[u8], capabilities: u64) -> Result<Vec<u8>, SeccompError> {
    let profile: Profile = serde_json::from_slice(json)?;
    let otherwise = action(&profile.default_action, profile.default_errno_ret)?;
    let mut rules = Vec::new();
    for entry in profile.syscalls.iter().filter(|entry| entry.counts(capabilities)) {
        let action = action(&entry.action, entry.errno_ret)?;
        let conditions =
            entry.args.iter().flatten().map(Argument::condition).collect::<Result<Vec<_>, _>>()?;
        for name in entry.names.iter().chain(&entry.name) {
            let Some(number) = number(name) else { continue };
            rules.push(Rule { number, conditions: conditions.clone(), action });
        }
    }
    assemble(&rules, otherwise)
}

/// Returns the number of a system call on this processor.
pub(super) fn number(name: &str) -> Option<u32> {
    u32::try_from(Sysno::from_str(name).ok()?.id()).ok()
}

fn action(name: &str, errno: Option<u32>) -> Result<Action, SeccompError> {
    Ok(match name {
        "SCMP_ACT_ALLOW" => Action::ALLOW,
        "SCMP_ACT_LOG" => Action::LOG,
        "SCMP_ACT_ERRNO" => Action::errno(errno.unwrap_or(EPERM)),
        "SCMP_ACT_TRAP" => Action::TRAP,
        "SCMP_ACT_TRACE" => Action::trace(errno.unwrap_or(EPERM)),
        "SCMP_ACT_KILL" | "SCMP_ACT_KILL_THREAD" => Action::KILL_THREAD,
        "SCMP_ACT_KILL_PROCESS" => Action::KILL_PROCESS,
        other => return Err(SeccompError::Action(other.to_owned())),
    })
}

impl Entry {
    fn counts(&self, capabilities: u64) -> bool {
        let has = |name: &String| has_capability(capabilities, name.trim_start_matches("CAP_"));
        let here = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
        let is_here = |arches: &Vec<String>| arches.iter().any(|arch| arch == here);
        let included = self.includes.as_ref().is_none_or(|filter| {
            filter.caps.iter().all(has) && (filter.arches.is_empty() || is_here(&filter.arches))
        });
        let excluded = self
            .excludes
            .as_ref()
            .is_some_and(|filter| filter.caps.iter().any(has) || is_here(&filter.arches));
        included && !excluded
    }
}

impl Argument {
    fn condition(&self) -> Result<Condition, SeccompError> {
        if self.index > 5 {
            return Err(SeccompError::Argument(self.index));
        }
        let test = match self.op.as_str() {
            "SCMP_CMP_EQ" => Test::Equal(self.value),
            "SCMP_CMP_NE" => Test::Unequal(self.value),
            "SCMP_CMP_MASKED_EQ" => Test::Masked { mask: self.value, value: self.value_two & self.value },
            "SCMP_CMP_GT" => Test::Greater(self.value),
            "SCMP_CMP_GE" => Test::NotLess(self.value),
            "SCMP_CMP_LT" => Test::Less(self.value),
            "SCMP_CMP_LE" => Test::NotGreater(self.value),
            other => return Err(SeccompError::Operator(other.to_owned())),
        };
        Ok(Condition { argument: self.index, test })
    }
}

#[cfg(test)]
mod tests {
    use super::super::bpf::tests::run;
    use super::*;

    const ALLOW: u32 = 0x7fff_0000;
    const DENIED: u32 = 0x0005_0001;

    fn verdict(program: &[u8], name: &str, arguments: [u64; 6]) -> u32 {
        run(program, number(name).unwrap(), arguments)
    }

    #[test]
    fn syscall_name_and_names_fields_are_read() {
        let json = br#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
            {"name": "chmod", "action": "SCMP_ACT_ERRNO"},
            {"names": ["fchmodat", "no_such_call"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}]}"#;
        let program = compile(json, 0).unwrap();
        assert_eq!(verdict(&program, "fchmodat", [0; 6]), 0x0005_0026);
        assert_eq!(verdict(&program, "read", [0; 6]), ALLOW);
        if let Some(chmod) = number("chmod") {
            assert_eq!(run(&program, chmod, [0; 6]), DENIED);
        }
    }

    #[test]
    fn entries_apply_by_capability_and_architecture() {
        let json = br#"{"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [
            {"names": ["mount"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
            {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "excludes": {"caps": ["CAP_SYS_ADMIN"]},
             "args": [{"index": 0, "value": 2114060288, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]},
            {"names": ["read"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["s390x"]}}]}"#;
        let (plain, admin) = (compile(json, 0).unwrap(), compile(json, 1 << 21).unwrap());
        assert_eq!((verdict(&plain, "mount", [0; 6]), verdict(&admin, "mount", [0; 6])), (DENIED, ALLOW));
        assert_eq!(verdict(&plain, "clone", [0x11, 0, 0, 0, 0, 0]), ALLOW);
        assert_eq!(verdict(&plain, "clone", [0x1000_0011, 0, 0, 0, 0, 0]), DENIED, "a user namespace");
        assert_eq!(verdict(&admin, "clone", [0; 6]), DENIED);
        assert_eq!(verdict(&plain, "read", [0; 6]), DENIED);
    }

    #[test]
    fn unknown_parts_are_refused() {
        for (json, want) in [
            ("{}", "missing field"),
            (r#"{"defaultAction": "SCMP_ACT_NOPE"}"#, "SCMP_ACT_NOPE"),
            (
                r#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["read"], "action": "SCMP_ACT_ERRNO",
                    "args": [{"index": 6, "value": 0, "op": "SCMP_CMP_EQ"}]}]}"#,
                "argument 6",
            ),
        ] {
            let error = compile(json.as_bytes(), 0).unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
        }
    }
}
