//! Credentials of a pod for pulling its images. Pure.

use coracle_oci::{Credentials, PullSecret, Reference};
use k8s_openapi::api::core::v1::{Pod, Secret};

use crate::objects::Objects;

/// Types of pull Secrets, and the data key of each (API reference of Secret).
const KEY: (&str, &str) = ("kubernetes.io/dockerconfigjson", ".dockerconfigjson");
const LEGACY_KEY: (&str, &str) = ("kubernetes.io/dockercfg", ".dockercfg");

/// Returns the credentials for an image, in the order in which they are tried; none: those of the node are used. The second
/// part names Secrets that do not exist or cannot be read.
pub(crate) fn pull_credentials(pod: &Pod, objects: &Objects, image: &str) -> (Vec<Credentials>, Vec<String>) {
    let (mut found, mut unusable) = (vec![], vec![]);
    let Ok(reference) = image.parse::<Reference>() else { return (found, unusable) };
    let names = pod.spec.iter().flat_map(|spec| spec.image_pull_secrets.iter().flatten());
    for name in names.map(|secret| &secret.name).filter(|name| !name.is_empty()) {
        match objects.secrets.get(name).map(|secret| read(secret)) {
            None => unusable.push(format!("Secret {name:?} not found")),
            Some(Err(why)) => unusable.push(format!("invalid Secret {name:?}: {why}")),
            Some(Ok(secret)) => found.extend(secret.credentials(&reference)),
        }
    }
    (found, unusable)
}

fn read(secret: &Secret) -> Result<PullSecret, String> {
    let value =
        |key: &str| secret.data.as_ref().and_then(|data| data.get(key)).map(|bytes| bytes.0.as_slice());
    let kind = secret.type_.as_deref();
    let parsed = match (value(KEY.1), value(LEGACY_KEY.1)) {
        (Some(json), _) if kind == Some(KEY.0) => PullSecret::parse(json),
        (_, Some(json)) if kind == Some(LEGACY_KEY.0) => PullSecret::parse_legacy(json),
        _ => return Err(format!("its type is not {} or {}", KEY.0, LEGACY_KEY.0)),
    };
    parsed.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use k8s_openapi::ByteString;
    use serde_json::json;

    use super::*;

    fn secret(kind: &str, key: &str, text: &str) -> Arc<Secret> {
        let data = [(key.to_owned(), ByteString(text.as_bytes().to_vec()))].into();
        Arc::new(Secret { type_: Some(kind.to_owned()), data: Some(data), ..Secret::default() })
    }

    #[test]
    fn secrets_of_the_pod_are_read_in_its_order() {
        let entry = |user: &str| format!(r#"{{"r.io":{{"username":"{user}","password":"p"}}}}"#);
        let full = |user: &str| format!(r#"{{"auths":{}}}"#, entry(user));
        let objects = Objects {
            secrets: [
                ("new".to_owned(), secret(KEY.0, KEY.1, &full("a"))),
                ("old".to_owned(), secret(LEGACY_KEY.0, LEGACY_KEY.1, &entry("b"))),
                ("other".to_owned(), secret("Opaque", KEY.1, &full("c"))),
                ("broken".to_owned(), secret(KEY.0, KEY.1, "hunter2")),
            ]
            .into(),
            ..Objects::default()
        };
        let names = ["old", "new", "other", "broken", "absent"].map(|name| json!({"name": name}));
        let spec = json!({"containers": [], "imagePullSecrets": names});
        let pod: Pod = serde_json::from_value(json!({"spec": spec})).unwrap();
        let (found, unusable) = pull_credentials(&pod, &objects, "r.io/app:1");
        assert_eq!(format!("{found:?}"), r#"[Basic("b"), Basic("a")]"#);
        assert_eq!(unusable.len(), 3, "{unusable:?}");
        assert!(!unusable.concat().contains("hunter2"));
        assert_eq!(pull_credentials(&pod, &objects, "elsewhere.io/app:1").0, []);
    }
}
