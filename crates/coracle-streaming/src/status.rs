//! Content of the error stream at the end of a session. Pure.

use bytes::Bytes;
use serde_json::json;

use crate::session::SessionOutcome;

/// Format of the error stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// v1 to v3: nothing on success, else text.
    Text,
    /// v4 and v5: a `Status` of `meta.k8s.io/v1` as JSON.
    Json,
}

/// Returns the content of the error stream; empty on success with [`Form::Text`].
pub(crate) fn content(outcome: &SessionOutcome, form: Form) -> Bytes {
    let message = match outcome {
        SessionOutcome::Exited(0) => None,
        SessionOutcome::Exited(code) => Some(format!("command terminated with non-zero exit code: {code}")),
        SessionOutcome::Failed(message) => Some(message.clone()),
    };
    if form == Form::Text {
        return message.unwrap_or_default().into();
    }
    let status = match outcome {
        SessionOutcome::Exited(0) => json!({"metadata": {}, "status": "Success"}),
        SessionOutcome::Exited(code) => json!({
            "metadata": {}, "status": "Failure", "message": message, "reason": "NonZeroExitCode",
            "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
        }),
        SessionOutcome::Failed(_) => json!({
            "metadata": {}, "status": "Failure", "message": message, "reason": "InternalError",
            "details": {"causes": [{"message": message}]}, "code": 500,
        }),
    };
    status.to_string().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_table() {
        let failed = || SessionOutcome::Failed("container \"a\" not found".into());
        for (why, outcome, form, want) in [
            ("success", SessionOutcome::Exited(0), Form::Json, r#"{"metadata":{},"status":"Success"}"#),
            (
                "a code is a cause",
                SessionOutcome::Exited(137),
                Form::Json,
                r#"{"details":{"causes":[{"message":"137","reason":"ExitCode"}]},"message":"command terminated with non-zero exit code: 137","metadata":{},"reason":"NonZeroExitCode","status":"Failure"}"#,
            ),
            (
                "a failure has no code",
                failed(),
                Form::Json,
                r#"{"code":500,"details":{"causes":[{"message":"container \"a\" not found"}]},"message":"container \"a\" not found","metadata":{},"reason":"InternalError","status":"Failure"}"#,
            ),
            ("success of old clients is silence", SessionOutcome::Exited(0), Form::Text, ""),
            (
                "old clients get no code",
                SessionOutcome::Exited(1),
                Form::Text,
                "command terminated with non-zero exit code: 1",
            ),
            ("old clients get text", failed(), Form::Text, "container \"a\" not found"),
        ] {
            let got = content(&outcome, form);
            let got = std::str::from_utf8(&got).unwrap();
            if form == Form::Json {
                let value = |text| serde_json::from_str::<serde_json::Value>(text).unwrap();
                assert_eq!(value(got), value(want), "{why}");
            } else {
                assert_eq!(got, want, "{why}");
            }
        }
    }
}
