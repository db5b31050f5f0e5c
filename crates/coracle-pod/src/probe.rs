//! Probes of containers: when a check is due, and what its result means. Pure.
//!
//! ```text
//! startup ── passes ──▶ readiness and liveness begin
//! readiness: false until it passed      liveness, startup: true until they failed
//! ```

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Probe};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use crate::probe::http::HttpRequest;
use crate::time::{add, seconds};

pub mod http;
pub mod prober;

/// Kind of a container's probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProbeKind {
    /// Startup probe: the others wait for it; its failure restarts the container.
    Startup,
    /// Liveness probe: its failure restarts the container.
    Liveness,
    /// Readiness probe: the container takes requests while it passes.
    Readiness,
}

impl ProbeKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Startup, Self::Liveness, Self::Readiness];

    /// Returns the name of the probe in messages of events.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Startup => "Startup",
            Self::Liveness => "Liveness",
            Self::Readiness => "Readiness",
        }
    }

    /// Returns the probe of this kind that a container declares.
    #[must_use]
    pub fn of(self, container: &Container) -> Option<&Probe> {
        match self {
            Self::Startup => container.startup_probe.as_ref(),
            Self::Liveness => container.liveness_probe.as_ref(),
            Self::Readiness => container.readiness_probe.as_ref(),
        }
    }
}

/// Timing and thresholds of a probe, with the defaults of the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeTiming {
    /// Time between the start of the container and the first check.
    pub initial_delay: Duration,
    /// Time between checks.
    pub period: Duration,
    /// Time limit of one try.
    pub limit: Duration,
    /// Consecutive successes that make the probe pass.
    pub successes: u32,
    /// Consecutive failures that make the probe fail.
    pub failures: u32,
}

/// Returns the timing and thresholds of a probe.
#[must_use]
pub fn timing(probe: &Probe) -> ProbeTiming {
    let at_least_one = |value: Option<i32>, default: i32| value.filter(|value| *value > 0).unwrap_or(default);
    let count = |value, default| u32::try_from(at_least_one(value, default)).unwrap_or(1);
    let time = |value, default| seconds(at_least_one(value, default).into());
    ProbeTiming {
        initial_delay: seconds(probe.initial_delay_seconds.unwrap_or(0).into()),
        period: time(probe.period_seconds, 10),
        limit: time(probe.timeout_seconds, 1),
        successes: count(probe.success_threshold, 1),
        failures: count(probe.failure_threshold, 3),
    }
}

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeOutcome {
    /// The check passed.
    Success,
    /// The check passed with a warning.
    Warning(String),
    /// The check failed.
    Failure(String),
    /// The check could not be carried out, which says nothing about the container.
    Unknown(String),
}

/// Verdict of a probe on its container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeVerdict {
    /// No verdict yet.
    Pending,
    /// The probe passed often enough.
    Passed,
    /// The probe failed often enough.
    Failed,
}

/// State of a container's probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeState {
    /// Verdict on the container.
    pub verdict: ProbeVerdict,
    /// Consecutive equal results: their number, and whether they passed.
    pub streak: (u32, bool),
    /// Time of the last check.
    pub checked_at: Timestamp,
    /// Time of the last change of the verdict.
    pub changed_at: Timestamp,
}

/// Returns when the next check is due, for a container that was started at `started_at`. `None`: no more checks.
#[must_use]
pub fn due_at(
    kind: ProbeKind,
    timing: &ProbeTiming,
    state: Option<&ProbeState>,
    started_at: Timestamp,
) -> Option<Timestamp> {
    let Some(state) = state else { return Some(add(started_at, timing.initial_delay)) };
    match (kind, state.verdict) {
        // The verdict is final; the container is restarted on failure.
        (ProbeKind::Startup, ProbeVerdict::Passed | ProbeVerdict::Failed)
        | (ProbeKind::Liveness, ProbeVerdict::Failed) => None,
        _ => Some(add(state.checked_at, timing.period)),
    }
}

/// Returns the state after one more result.
#[must_use]
pub fn after(
    timing: &ProbeTiming,
    state: Option<&ProbeState>,
    outcome: &ProbeOutcome,
    now: Timestamp,
) -> ProbeState {
    let fresh =
        ProbeState { verdict: ProbeVerdict::Pending, streak: (0, true), checked_at: now, changed_at: now };
    let before = state.copied().unwrap_or(fresh);
    let passed = match outcome {
        ProbeOutcome::Success | ProbeOutcome::Warning(_) => true,
        ProbeOutcome::Failure(_) => false,
        ProbeOutcome::Unknown(_) => return ProbeState { checked_at: now, ..before },
    };
    let count = if before.streak.1 == passed { before.streak.0.saturating_add(1) } else { 1 };
    let enough = count >= if passed { timing.successes } else { timing.failures };
    let verdict = match (enough, passed) {
        (true, true) => ProbeVerdict::Passed,
        (true, false) => ProbeVerdict::Failed,
        (false, _) => before.verdict,
    };
    let changed_at = if verdict == before.verdict { before.changed_at } else { now };
    ProbeState { verdict, streak: (count, passed), checked_at: now, changed_at }
}

/// Check of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeCheck {
    /// A command in the container exits with 0.
    Exec(Vec<String>),
    /// An HTTP request is answered with a status from 200 to 399.
    Http(Box<HttpRequest>),
    /// A TCP connection is accepted.
    Tcp {
        /// Address or name.
        host: String,
        /// Port.
        port: u16,
    },
    /// The service `grpc.health.v1.Health` reports SERVING.
    Grpc {
        /// Address.
        host: String,
        /// Port.
        port: u16,
        /// Name of the service in the request.
        service: String,
    },
    /// The probe cannot be carried out, for this reason.
    Invalid(String),
}

/// Returns what a probe of a container checks. `address` is that of its pod.
#[must_use]
pub fn check(probe: &Probe, container: &Container, address: &str) -> ProbeCheck {
    if let Some(exec) = &probe.exec {
        return ProbeCheck::Exec(exec.command.clone().unwrap_or_default());
    }
    if let Some(get) = &probe.http_get {
        return match http::request(get, container, address) {
            Ok(request) => ProbeCheck::Http(Box::new(request)),
            Err(why) => ProbeCheck::Invalid(why),
        };
    }
    if let Some(tcp) = &probe.tcp_socket {
        let host = tcp.host.clone().filter(|host| !host.is_empty()).unwrap_or_else(|| address.to_owned());
        return match port(&tcp.port, container) {
            Ok(port) => ProbeCheck::Tcp { host, port },
            Err(why) => ProbeCheck::Invalid(why),
        };
    }
    if let Some(grpc) = &probe.grpc {
        let service = grpc.service.clone().unwrap_or_default();
        return match port(&IntOrString::Int(grpc.port), container) {
            Ok(port) => ProbeCheck::Grpc { host: address.to_owned(), port, service },
            Err(why) => ProbeCheck::Invalid(why),
        };
    }
    ProbeCheck::Invalid("invalid probe: it has no check".to_owned())
}

/// Returns a port that is given by number, or by its name in the container.
pub(crate) fn port(port: &IntOrString, container: &Container) -> Result<u16, String> {
    let number = match port {
        IntOrString::Int(number) => Some(*number),
        IntOrString::String(name) => {
            let named = container.ports.iter().flatten().find(|port| port.name.as_deref() == Some(name));
            named.map(|port| port.container_port).or_else(|| name.parse().ok())
        }
    };
    let shown = match port {
        IntOrString::Int(number) => number.to_string(),
        IntOrString::String(name) => name.clone(),
    };
    let number = number.and_then(|number| u16::try_from(number).ok()).filter(|number| *number != 0);
    number.ok_or_else(|| format!("invalid port {shown:?}: the container has no such port"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn probe(value: Value) -> Probe {
        serde_json::from_value(value).unwrap()
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    /// Returns the verdict after each result: `+` passed, `-` failed, `?` unknown.
    fn verdicts(numbers: Value, results: &str) -> String {
        let timing = timing(&probe(numbers));
        let mut state = None;
        let mut shown = String::new();
        for (second, result) in results.chars().enumerate() {
            let outcome = match result {
                '+' => ProbeOutcome::Success,
                '-' => ProbeOutcome::Failure(String::new()),
                _ => ProbeOutcome::Unknown(String::new()),
            };
            let next = after(&timing, state.as_ref(), &outcome, at(i64::try_from(second).unwrap()));
            shown.push(match next.verdict {
                ProbeVerdict::Pending => '.',
                ProbeVerdict::Passed => 'P',
                ProbeVerdict::Failed => 'F',
            });
            state = Some(next);
        }
        shown
    }

    #[test]
    fn thresholds_decide_the_verdict() {
        for (numbers, results, want) in [
            (json!({}), "+", "P"),
            (json!({}), "---", "..F"),
            (json!({}), "+---", "PPPF"),
            (json!({}), "+--+---", "PPPPPPF"),
            (json!({}), "---+", "..FP"),
            (json!({"failureThreshold": 1}), "-+-", "FPF"),
            (json!({"successThreshold": 2, "failureThreshold": 2}), "+-++--", "...PPF"),
            (json!({}), "-?--", "...F"),
            (json!({}), "???", "..."),
        ] {
            assert_eq!(verdicts(numbers.clone(), results), want, "{numbers} {results}");
        }
    }

    #[test]
    fn checks_are_due_after_delay_and_period() {
        let timing = timing(&probe(json!({"initialDelaySeconds": 5, "periodSeconds": 7})));
        let state =
            |verdict| ProbeState { verdict, streak: (1, true), checked_at: at(100), changed_at: at(90) };
        for (why, kind, state, want) in [
            ("first", ProbeKind::Liveness, None, Some(15)),
            ("next", ProbeKind::Liveness, Some(state(ProbeVerdict::Passed)), Some(107)),
            ("startup is decided", ProbeKind::Startup, Some(state(ProbeVerdict::Passed)), None),
            ("startup failed", ProbeKind::Startup, Some(state(ProbeVerdict::Failed)), None),
            ("startup is not decided", ProbeKind::Startup, Some(state(ProbeVerdict::Pending)), Some(107)),
            ("liveness failed", ProbeKind::Liveness, Some(state(ProbeVerdict::Failed)), None),
            ("readiness may come back", ProbeKind::Readiness, Some(state(ProbeVerdict::Failed)), Some(107)),
        ] {
            assert_eq!(due_at(kind, &timing, state.as_ref(), at(10)), want.map(at), "{why}");
        }
    }

    #[test]
    fn defaults_are_those_of_the_api() {
        let second = Duration::from_secs;
        let defaults = ProbeTiming {
            initial_delay: second(0),
            period: second(10),
            limit: second(1),
            successes: 1,
            failures: 3,
        };
        assert_eq!(timing(&probe(json!({}))), defaults);
        assert_eq!(timing(&probe(json!({"periodSeconds": 0, "failureThreshold": 0}))), defaults);
    }

    #[test]
    fn probe_checks_resolve_ports_and_hosts() {
        let container: Container =
            serde_json::from_value(json!({"name": "c", "ports": [{"name": "web", "containerPort": 8080}]}))
                .unwrap();
        let of = |value: Value| check(&probe(value), &container, "10.1.0.9");
        let tcp = |host: &str, port| ProbeCheck::Tcp { host: host.into(), port };
        assert_eq!(of(json!({"tcpSocket": {"port": "web"}})), tcp("10.1.0.9", 8080));
        assert_eq!(of(json!({"tcpSocket": {"port": 81, "host": "db"}})), tcp("db", 81));
        assert_eq!(of(json!({"tcpSocket": {"port": "82"}})), tcp("10.1.0.9", 82));
        assert_eq!(of(json!({"exec": {"command": ["true"]}})), ProbeCheck::Exec(vec!["true".into()]));
        let grpc = ProbeCheck::Grpc { host: "10.1.0.9".into(), port: 90, service: "s".into() };
        assert_eq!(of(json!({"grpc": {"port": 90, "service": "s"}})), grpc);
        for bad in [json!({"tcpSocket": {"port": "no"}}), json!({"tcpSocket": {"port": 70000}}), json!({})] {
            assert!(matches!(of(bad.clone()), ProbeCheck::Invalid(_)), "{bad}");
        }
    }
}
