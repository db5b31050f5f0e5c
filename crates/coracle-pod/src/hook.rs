//! Lifecycle hooks of containers. Pure.

use k8s_openapi::api::core::v1::{Container, LifecycleHandler};

use crate::probe::http;
use crate::step::HookAction;
use crate::time::seconds;

/// Returns the action of a hook. `address` is that of its pod.
#[must_use]
pub(crate) fn action(hook: &LifecycleHandler, container: &Container, address: &str) -> HookAction {
    if let Some(exec) = &hook.exec {
        return HookAction::Exec(exec.command.clone().unwrap_or_default());
    }
    if let Some(get) = &hook.http_get {
        return match http::request(get, container, address) {
            Ok(request) => HookAction::Http(Box::new(request)),
            Err(why) => HookAction::Invalid(why),
        };
    }
    match &hook.sleep {
        Some(sleep) => HookAction::Sleep(seconds(sleep.seconds)),
        None => HookAction::Invalid("invalid hook: neither exec, httpGet nor sleep".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;

    #[test]
    fn hooks_have_one_action() {
        let of = |hook| action(&serde_json::from_value(hook).unwrap(), &Container::default(), "10.1.0.9");
        assert_eq!(of(json!({"exec": {"command": ["a"]}})), HookAction::Exec(vec!["a".into()]));
        assert_eq!(of(json!({"sleep": {"seconds": 3}})), HookAction::Sleep(Duration::from_secs(3)));
        let HookAction::Http(request) = of(json!({"httpGet": {"port": 80}})) else {
            unreachable!("a request")
        };
        assert_eq!((request.host.as_str(), request.path.as_str()), ("10.1.0.9", "/"));
        for bad in [json!({}), json!({"tcpSocket": {"port": 1}}), json!({"httpGet": {"port": "no"}})] {
            assert!(matches!(of(bad.clone()), HookAction::Invalid(_)), "{bad}");
        }
    }
}
