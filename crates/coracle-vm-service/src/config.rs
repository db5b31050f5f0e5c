//! Configuration of the controller.

use coracle_reconcile::ControllerConfig;

/// Name of this controller in metrics, events and its Lease.
pub const CONTROLLER: &str = "vm-service";

/// Configuration of the controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// Common configuration of all controllers.
    pub common: ControllerConfig,
    /// Identity of this process in Events.
    pub identity: String,
}
