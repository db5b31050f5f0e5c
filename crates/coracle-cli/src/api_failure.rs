//! Failures of requests to the API server.

use crate::error::{Failure, exit};

/// Returns the failure of a request to the API server.
pub(crate) fn request_failure(what: &str, error: &kube::Error) -> Failure {
    let (code, exit) = match error {
        kube::Error::Api(status) if status.code == 404 => ("COR-API-002", exit::NOT_FOUND),
        kube::Error::Api(status) if status.code == 403 || status.code == 401 => {
            ("COR-API-003", exit::FORBIDDEN)
        }
        kube::Error::Api(status) if status.code == 409 => ("COR-API-004", exit::CONFLICT),
        _ => ("COR-API-001", exit::FAILED),
    };
    let why = match error {
        // The error's own text contains every field of the answer.
        kube::Error::Api(status) => status.message.clone(),
        error => chain(error),
    };
    let failure = Failure::new(code, crate::error::printable(&format!("{what}: {why}"))).exit(exit);
    match is_missing_kind(error) {
        true => failure.help("the cluster does not know the kind: coracle crd print | kubectl apply -f -"),
        false => failure,
    }
}

/// Returns whether the kind is not installed: the API server then answers with a 404 that names no object.
fn is_missing_kind(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else { return false };
    let named = status.details.as_ref().is_some_and(|details| !details.name.is_empty());
    status.code == 404 && !named
}

pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let words = cause.to_string();
        if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_kind_error_names_the_install_command() {
        let status = kube::core::Status {
            message: "404 page not found".into(),
            reason: "NotFound".into(),
            code: 404,
            ..kube::core::Status::default()
        };
        let failure = request_failure("list MikromVMs", &kube::Error::Api(Box::new(status.clone())));
        assert!(failure.help.is_some_and(|help| help.contains("coracle crd print")));
        let details = serde_json::from_value(serde_json::json!({"name": "web"})).unwrap();
        let absent = kube::core::Status { details: Some(details), ..status };
        assert!(request_failure("get web", &kube::Error::Api(Box::new(absent))).help.is_none());
    }
}
