//! Maps a request to the permission that it needs (kubelet, `pkg/kubelet/server/auth.go`). Pure.

use http::Method;

/// Permission on the node that the user of a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Attributes {
    pub(super) verb: &'static str,
    /// Subresources, of which one is sufficient. Checked in this order.
    pub(super) subresources: &'static [&'static str],
}

/// Paths and their subresources; each applies to the paths below, too. All other paths need `proxy`.
const PATHS: [(&str, &[&str]); 12] = [
    ("/stats", &["stats"]),
    ("/metrics", &["metrics"]),
    ("/logs", &["log"]),
    ("/checkpoint", &["checkpoint"]),
    ("/statusz", &["statusz"]),
    ("/pods", &["pods", "proxy"]),
    ("/runningpods", &["pods", "proxy"]),
    ("/healthz", &["healthz", "proxy"]),
    ("/configz", &["configz", "proxy"]),
    ("/flagz", &["configz", "proxy"]),
    ("/exec", &["proxy"]),
    ("/run", &["proxy"]),
];
/// Paths whose upgrades start something in a pod. Read permission is not sufficient for them.
const STREAMING: [&str; 3] = ["/exec", "/attach", "/portForward"];

/// Returns the permission that a request needs. `is_upgrade`: the request asks for another protocol.
pub(super) fn attributes(method: &Method, path: &str, is_upgrade: bool) -> Attributes {
    let subresources = PATHS.iter().find(|(prefix, _)| is_below(prefix, path));
    let subresources = subresources.map_or(&["proxy"][..], |(_, subresources)| subresources);
    let verb = match *method {
        _ if is_upgrade && STREAMING.iter().any(|prefix| is_below(prefix, path)) => "create",
        Method::GET | Method::HEAD => "get",
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "",
    };
    Attributes { verb, subresources }
}

fn is_below(prefix: &str, path: &str) -> bool {
    path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_table() {
        for (method, path, is_upgrade, want) in [
            ("GET", "/stats/summary", false, "get stats"),
            ("POST", "/stats/summary", false, "create stats"),
            ("GET", "/metrics", false, "get metrics"),
            ("GET", "/metrics/resource", false, "get metrics"),
            ("GET", "/metricsx", false, "get proxy"),
            ("GET", "/logs/", false, "get log"),
            ("POST", "/checkpoint/a/b/c", false, "create checkpoint"),
            ("GET", "/statusz", false, "get statusz"),
            ("GET", "/pods", false, "get pods proxy"),
            ("HEAD", "/pods", false, "get pods proxy"),
            ("GET", "/runningpods/", false, "get pods proxy"),
            ("GET", "/healthz", false, "get healthz proxy"),
            ("GET", "/healthz/ping", false, "get healthz proxy"),
            ("GET", "/configz", false, "get configz proxy"),
            ("GET", "/flagz", false, "get configz proxy"),
            ("GET", "/containerLogs/a/b/c", false, "get proxy"),
            ("POST", "/run/a/b/c", false, "create proxy"),
            ("POST", "/exec/a/b/c", true, "create proxy"),
            ("GET", "/exec/a/b/c", true, "create proxy"),
            ("GET", "/attach/a/b/c", true, "create proxy"),
            ("GET", "/portForward/a/b", true, "create proxy"),
            ("GET", "/exec/a/b/c", false, "get proxy"),
            ("GET", "/pods", true, "get pods proxy"),
            ("PUT", "/debug/flags/v", false, "update proxy"),
            ("PATCH", "/", false, "patch proxy"),
            ("DELETE", "/pods", false, "delete pods proxy"),
            ("GET", "/pods/../exec", false, "get pods proxy"),
            ("GET", "/%70ods", false, "get proxy"),
            ("TRACE", "/pods", false, " pods proxy"),
        ] {
            let got = attributes(&method.parse().unwrap(), path, is_upgrade);
            assert_eq!(format!("{} {}", got.verb, got.subresources.join(" ")), want, "{method} {path}");
        }
    }
}
