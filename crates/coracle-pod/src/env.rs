//! Environment of a container: variables from the spec, from objects, from fields of the pod, and from services.
//!
//! The order is that of the kubelet: variables of services, then `envFrom`, then `env`; a later variable replaces an earlier
//! one. Values of `env`, commands and arguments may refer to earlier variables as `$(NAME)`.

mod field;
mod services;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ConfigMapKeySelector, Container, EnvVar, EnvVarSource, SecretKeySelector};

pub use coracle_types::expand;
pub use field::{FieldContext, field, resource_field};
pub use services::service_variables;

use crate::objects::Objects;
use crate::reason;

/// Environment of a container, and notes for events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment {
    /// Variables, by name.
    pub variables: BTreeMap<String, String>,
    /// Notes about optional objects that do not exist, and about names that are invalid in an environment.
    pub notes: Vec<Note>,
}

/// Remark for the user that does not prevent the start of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Reason of the event.
    pub reason: &'static str,
    /// Message of the event.
    pub message: String,
}

/// Error that prevents the creation of a container for now: `CreateContainerConfigError`. The creation is retried.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ConfigError {
    /// Reason of the event.
    pub event: &'static str,
    /// Missing object or invalid value.
    pub message: String,
}

impl ConfigError {
    /// Returns an error with the general reason `Failed`.
    #[must_use]
    pub fn new(message: impl Into<String>) -> Self {
        Self { event: reason::FAILED, message: message.into() }
    }
}

/// Returns the environment of a container.
///
/// # Errors
/// [`ConfigError`] for a mandatory object or key that does not exist, or a reference that cannot be resolved.
pub fn environment(
    container: &Container,
    context: &FieldContext<'_>,
    objects: &Objects,
) -> Result<Environment, ConfigError> {
    let mut environment = Environment::default();
    from_objects(container, objects, &mut environment)?;
    let services = service_variables(context.pod, &objects.services);
    for variable in container.env.iter().flatten() {
        let value = match (&variable.value, &variable.value_from) {
            (_, Some(from)) => {
                value_from(variable, from, container, context, objects, &mut environment.notes)?
            }
            (value, None) => {
                let text = value.as_deref().unwrap_or_default();
                let known = |name: &str| {
                    environment.variables.get(name).or_else(|| services.get(name)).map(String::as_str)
                };
                Some(expand(text, known))
            }
        };
        if let Some(value) = value {
            environment.variables.insert(variable.name.clone(), value);
        }
    }
    for (name, value) in services {
        environment.variables.entry(name).or_insert(value);
    }
    Ok(environment)
}

/// Adds the variables of whole ConfigMaps and Secrets (`envFrom`).
fn from_objects(container: &Container, objects: &Objects, to: &mut Environment) -> Result<(), ConfigError> {
    for source in container.env_from.iter().flatten() {
        let prefix = source.prefix.as_deref().unwrap_or_default();
        if let Some(wanted) = &source.config_map_ref {
            let Some(map) = objects.config_maps.get(&wanted.name) else {
                report_missing(CONFIG_MAP, &wanted.name, None, wanted.optional, &mut to.notes)?;
                continue;
            };
            let pairs = map.data.iter().flatten().map(|(key, value)| (key.clone(), value.clone()));
            add_variables(prefix, pairs, to);
        }
        if let Some(wanted) = &source.secret_ref {
            let Some(secret) = objects.secrets.get(&wanted.name) else {
                report_missing(SECRET, &wanted.name, None, wanted.optional, &mut to.notes)?;
                continue;
            };
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let pairs = secret.data.iter().flatten().map(|(key, value)| (key.clone(), text(&value.0)));
            add_variables(prefix, pairs, to);
        }
    }
    Ok(())
}

/// Adds pairs to the environment. Names that are invalid in an environment are left out and noted.
fn add_variables(prefix: &str, pairs: impl Iterator<Item = (String, String)>, to: &mut Environment) {
    let mut invalid = Vec::new();
    for (key, value) in pairs {
        let name = format!("{prefix}{key}");
        if is_name(&name) && !value.contains('\0') {
            to.variables.insert(name, value);
        } else {
            invalid.push(name);
        }
    }
    if !invalid.is_empty() {
        let message =
            format!("keys [{}] were skipped: no environment variable can have them", invalid.join(", "));
        to.notes.push(Note { reason: reason::INVALID_ENVIRONMENT_VARIABLE_NAMES, message });
    }
}

/// Returns whether a name is valid in an environment: printable ASCII without `=`.
fn is_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| (0x20..0x7f).contains(&b) && b != b'=')
}

/// Kind of object, with the reasons of its events.
struct ObjectKind {
    name: &'static str,
    optional: (&'static str, &'static str),
    mandatory: (&'static str, &'static str),
}

const CONFIG_MAP: ObjectKind = ObjectKind {
    name: "configmap",
    optional: (reason::OPTIONAL_CONFIG_MAP_NOT_FOUND, reason::OPTIONAL_CONFIG_MAP_KEY_NOT_FOUND),
    mandatory: (reason::MANDATORY_CONFIG_MAP_NOT_FOUND, reason::MANDATORY_CONFIG_MAP_KEY_NOT_FOUND),
};
const SECRET: ObjectKind = ObjectKind {
    name: "secret",
    optional: (reason::OPTIONAL_SECRET_NOT_FOUND, reason::OPTIONAL_SECRET_KEY_NOT_FOUND),
    mandatory: (reason::MANDATORY_SECRET_NOT_FOUND, reason::MANDATORY_SECRET_KEY_NOT_FOUND),
};

/// Reports a missing object or key: as a note when it is optional, else as an error.
fn report_missing(
    kind: ObjectKind,
    object: &str,
    key: Option<&str>,
    optional: Option<bool>,
    notes: &mut Vec<Note>,
) -> Result<(), ConfigError> {
    let message = match key {
        None => format!("{} {object:?} not found", kind.name),
        Some(key) => format!("key {key:?} not found in {} {object:?}", kind.name),
    };
    let pick = |(whole, part): (&'static str, &'static str)| if key.is_some() { part } else { whole };
    if optional == Some(true) {
        notes.push(Note { reason: pick(kind.optional), message });
        return Ok(());
    }
    Err(ConfigError { event: pick(kind.mandatory), message })
}

/// Returns the value of one variable; `None` when it is optional and its source does not exist.
fn value_from(
    variable: &EnvVar,
    from: &EnvVarSource,
    container: &Container,
    context: &FieldContext<'_>,
    objects: &Objects,
    notes: &mut Vec<Note>,
) -> Result<Option<String>, ConfigError> {
    if let Some(wanted) = &from.config_map_key_ref {
        return config_map_value(wanted, objects, notes);
    }
    if let Some(wanted) = &from.secret_key_ref {
        return secret_value(wanted, objects, notes);
    }
    if let Some(wanted) = &from.field_ref {
        return field(context, &wanted.field_path).map(Some);
    }
    if let Some(wanted) = &from.resource_field_ref {
        return resource_field(context, Some(container), wanted).map(Some);
    }
    Err(ConfigError::new(format!("invalid variable {:?}: its source is not supported", variable.name)))
}

fn config_map_value(
    wanted: &ConfigMapKeySelector,
    objects: &Objects,
    notes: &mut Vec<Note>,
) -> Result<Option<String>, ConfigError> {
    let (name, optional) = (&wanted.name, wanted.optional);
    let Some(map) = objects.config_maps.get(name) else {
        return report_missing(CONFIG_MAP, name, None, optional, notes).map(|()| None);
    };
    match map.data.iter().flatten().find(|(key, _)| **key == wanted.key) {
        Some((_, value)) => Ok(Some(value.clone())),
        None => report_missing(CONFIG_MAP, name, Some(&wanted.key), optional, notes).map(|()| None),
    }
}

fn secret_value(
    wanted: &SecretKeySelector,
    objects: &Objects,
    notes: &mut Vec<Note>,
) -> Result<Option<String>, ConfigError> {
    let (name, optional) = (&wanted.name, wanted.optional);
    let Some(secret) = objects.secrets.get(name) else {
        return report_missing(SECRET, name, None, optional, notes).map(|()| None);
    };
    match secret.data.iter().flatten().find(|(key, _)| **key == wanted.key) {
        Some((_, value)) => Ok(Some(String::from_utf8_lossy(&value.0).into_owned())),
        None => report_missing(SECRET, name, Some(&wanted.key), optional, notes).map(|()| None),
    }
}
