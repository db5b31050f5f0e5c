//! Environment of a guest: first the keys of whole objects, then single variables; a later variable replaces an earlier one.
//! Pure.

use coracle_api::{EnvFromSource, EnvVarSource, MikromVM};
use coracle_types::expand;
use kube::ResourceExt as _;

use crate::objects::Objects;
use crate::{InputError, namespace};

/// Returns names and values, in order of definition.
pub(crate) fn environment(
    vm: &MikromVM,
    node: &str,
    objects: &Objects,
) -> Result<Vec<(String, String)>, InputError> {
    let mut variables = Variables::default();
    for source in &vm.spec.env_from {
        for (name, value) in object_variables(source, objects)? {
            variables.set(name, value);
        }
    }
    for variable in &vm.spec.env {
        let value = match &variable.value_from {
            None => Some(expand(&variable.value, |name| variables.get(name))),
            Some(from) => value_from(from, vm, node, objects)
                .map_err(|error| InputError(format!("variable {}: {error}", variable.name)))?,
        };
        if let Some(value) = value {
            if value.contains('\0') {
                return Err(InputError(format!("variable {}: its value has a zero byte", variable.name)));
            }
            variables.set(variable.name.clone(), value);
        }
    }
    Ok(variables.0)
}

#[derive(Default)]
struct Variables(Vec<(String, String)>);

impl Variables {
    fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    fn set(&mut self, name: String, value: String) {
        match self.0.iter_mut().find(|(known, _)| *known == name) {
            Some(known) => known.1 = value,
            None => self.0.push((name, value)),
        }
    }
}

/// Returns the keys of an object that are valid names of variables, with their values.
fn object_variables(source: &EnvFromSource, objects: &Objects) -> Result<Vec<(String, String)>, InputError> {
    let pairs = if let Some(wanted) = &source.config_map_ref {
        match (objects.config_maps.get(&wanted.name), wanted.optional) {
            (None, false) => return Err(InputError(format!("ConfigMap {:?} not found", wanted.name))),
            (None, true) => vec![],
            (Some(map), _) => map.data.clone().unwrap_or_default().into_iter().collect(),
        }
    } else if let Some(wanted) = &source.secret_ref {
        match (objects.secrets.get(&wanted.name), wanted.optional) {
            (None, false) => return Err(InputError(format!("Secret {:?} not found", wanted.name))),
            (None, true) => vec![],
            (Some(secret), _) => {
                let data = secret.data.clone().unwrap_or_default().into_iter();
                // As in Pods, values that a variable cannot have are left out.
                data.filter_map(|(key, value)| Some((key, String::from_utf8(value.0).ok()?))).collect()
            }
        }
    } else {
        vec![]
    };
    let named = pairs.into_iter().map(|(key, value)| (format!("{}{key}", source.prefix), value));
    Ok(named.filter(|(name, value)| is_name(name) && !value.contains('\0')).collect())
}

/// True for printable ASCII without `=`.
fn is_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| (0x20..0x7f).contains(&b) && b != b'=')
}

/// Returns the value; `None` when an optional object or key does not exist.
fn value_from(
    from: &EnvVarSource,
    vm: &MikromVM,
    node: &str,
    objects: &Objects,
) -> Result<Option<String>, InputError> {
    if let Some(key) = &from.secret_key_ref {
        if key.optional && !objects.secrets.contains_key(&key.name) {
            return Ok(None);
        }
        return match objects.secret_key(&key.name, &key.key)? {
            None if !key.optional => {
                Err(InputError(format!("Secret {:?} has no key {:?}", key.name, key.key)))
            }
            found => Ok(found),
        };
    }
    if let Some(key) = &from.config_map_key_ref {
        let value = match objects.config_maps.get(&key.name) {
            None if key.optional => return Ok(None),
            None => return Err(InputError(format!("ConfigMap {:?} not found", key.name))),
            Some(map) => map.data.as_ref().and_then(|data| data.get(&key.key)).cloned(),
        };
        return match value {
            None if !key.optional => {
                Err(InputError(format!("ConfigMap {:?} has no key {:?}", key.name, key.key)))
            }
            found => Ok(found),
        };
    }
    let path = from.field_ref.as_ref().map(|field| field.field_path.as_str()).unwrap_or_default();
    field(path, vm, node).map(Some)
}

/// Returns a field of the object; a label or annotation that does not exist is empty.
fn field(path: &str, vm: &MikromVM, node: &str) -> Result<String, InputError> {
    let subscript = |prefix: &str| path.strip_prefix(prefix)?.strip_suffix("']");
    if let Some(key) = subscript("metadata.labels['") {
        return Ok(vm.labels().get(key).cloned().unwrap_or_default());
    }
    if let Some(key) = subscript("metadata.annotations['") {
        return Ok(vm.annotations().get(key).cloned().unwrap_or_default());
    }
    Ok(match path {
        "metadata.name" => vm.name_any(),
        "metadata.namespace" => namespace(vm),
        "metadata.uid" => vm.uid().unwrap_or_default(),
        "spec.vcpuCount" => vm.spec.vcpu_count.to_string(),
        "spec.memoryMB" => vm.spec.memory_mib.to_string(),
        "status.nodeName" => node.to_owned(),
        other => return Err(InputError(format!("a MikromVM has no field {other:?} for variables"))),
    })
}
