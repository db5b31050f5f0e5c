//! CocoonHibernations: observe, plan, execute, status.

mod plan;
pub(crate) mod reconcile;
