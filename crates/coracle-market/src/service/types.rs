//! Instance types: hardware of their nodes.

use std::collections::BTreeMap;

use coracle_auction::codec::{Codec, Malformed};
use coracle_proto::market as pb;

use super::{Service, check_name};
use crate::error::RequestError;
use crate::registry::Kind;
use crate::store::NameRow;

/// Most labels, or extended resources, of an instance type.
const WORDS_MAX: usize = 64;

type Words = BTreeMap<Box<str>, Box<str>>;

fn words(all: &BTreeMap<String, String>) -> Words {
    all.iter().map(|(key, value)| (key.as_str().into(), value.as_str().into())).collect()
}

fn texts(all: Words) -> BTreeMap<String, String> {
    all.into_iter().map(|(key, value)| (key.into(), value.into())).collect()
}

fn body_of(t: &pb::InstanceType) -> Vec<u8> {
    let mut body = Vec::new();
    t.vcpus.put(&mut body);
    t.memory_mib.put(&mut body);
    Box::<str>::from(t.gpu_model.as_str()).put(&mut body);
    t.gpus.put(&mut body);
    words(&t.extended_resources).put(&mut body);
    words(&t.labels).put(&mut body);
    t.list_price_micros.put(&mut body);
    body
}

fn type_of(name: String, body: &[u8]) -> Result<pb::InstanceType, Malformed> {
    let from = &mut &*body;
    Ok(pb::InstanceType {
        name,
        vcpus: Codec::get(from)?,
        memory_mib: Codec::get(from)?,
        gpu_model: Box::<str>::get(from)?.into(),
        gpus: Codec::get(from)?,
        extended_resources: texts(Codec::get(from)?),
        labels: texts(Codec::get(from)?),
        list_price_micros: Codec::get(from)?,
    })
}

impl Service {
    /// Stores an instance type. Existing markets keep their caps.
    pub(crate) async fn put_type(&self, t: pb::InstanceType) -> Result<pb::InstanceType, RequestError> {
        check_name("name", &t.name)?;
        if t.name.contains('/') {
            return Err(RequestError::invalid("name must not have a /: it is the first part of a market's"));
        }
        if t.vcpus == 0 || t.memory_mib == 0 {
            return Err(RequestError::invalid("vcpus and memory_mib must be above 0"));
        }
        if t.list_price_micros <= 0 {
            return Err(RequestError::invalid("list_price must be above 0"));
        }
        for (what, all) in [("labels", &t.labels), ("extended_resources", &t.extended_resources)] {
            let long = all.iter().any(|(key, value)| key.is_empty() || key.len() > 317 || value.len() > 253);
            if all.len() > WORDS_MAX || long {
                return Err(RequestError::invalid(format!("{what} must be at most {WORDS_MAX} words")));
            }
        }
        let body = body_of(&t);
        let no = self.registry.ensure(Kind::Type, &t.name, &body).await?;
        self.store
            .put_name(&NameRow { kind: Kind::Type as i64, no, name: t.name.clone(), body: body.clone() })
            .await?;
        self.registry.set_body(Kind::Type, no, body);
        Ok(t)
    }

    /// All instance types, by name.
    pub(crate) fn types(&self) -> Vec<pb::InstanceType> {
        let all = self.registry.all(Kind::Type).into_iter();
        let mut types: Vec<_> =
            all.filter_map(|(no, name)| type_of(name, &self.registry.body(Kind::Type, no)).ok()).collect();
        types.sort_by(|a, b| a.name.cmp(&b.name));
        types
    }

    /// Instance type of a market's nodes; `None`: it was never described.
    pub(crate) fn instance_type(&self, market: &str) -> Option<pb::InstanceType> {
        let name = market.split('/').next()?;
        let no = self.registry.number(Kind::Type, name)?;
        type_of(name.to_owned(), &self.registry.body(Kind::Type, no)).ok()
    }

    /// List price of a market's instance type, in micro-dollars.
    pub(crate) fn list_price(&self, market: &str) -> Option<i64> {
        Some(self.instance_type(market)?.list_price_micros)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instance_type_round_trip_is_lossless() {
        let t = pb::InstanceType {
            name: "a100-4x".into(),
            vcpus: 48,
            memory_mib: 512 * 1024,
            gpu_model: "a100".into(),
            gpus: 4,
            extended_resources: [("nvidia.com/gpu".to_owned(), "4".to_owned())].into(),
            labels: [("a".to_owned(), "b".to_owned())].into(),
            list_price_micros: 8_000_000,
        };
        assert_eq!(type_of("a100-4x".into(), &body_of(&t)), Ok(t.clone()));
        assert!(type_of("x".into(), &body_of(&t)[..3]).is_err());
    }
}
