//! CocoonSets: observe, plan, execute, status.

mod deletion;
pub(crate) mod drift;
mod execute;
mod members;
pub(crate) mod observe;
mod plan;
pub(crate) mod pods;
mod rebuild;
pub(crate) mod reconcile;
mod release;
mod status;
mod step;
#[cfg(test)]
pub(crate) mod testing;

pub(crate) use execute::annotate_pod;
pub(crate) use members::is_container_running;
pub(crate) use pods::unsupported_reason;
pub(crate) use reconcile::chain;
pub(crate) use step::PodId;
