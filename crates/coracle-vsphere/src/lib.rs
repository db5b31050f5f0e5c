//! The vCenter port: operations that a controller needs from vSphere, as a trait; and a SOAP client that implements it.
//!
//! The client keeps one session for each server and user. It watches VMs and tasks through one property collector for each site
//! instead of polling, and uploads to datastores over the same connection pool. It never decides what should exist, and never
//! starts a process.
//!
//! ```text
//!  controller ──▶ trait Vsphere ──▶ SoapVsphere ── POST /sdk, PUT /folder, /rest tags ──▶ vCenter
//! ```
//!
//! Object ids are opaque. Faults are distinguished by their type, never by their text.

mod credentials;
mod error;
mod identity;
mod metrics;
mod port;
mod soap;

pub use credentials::{Credentials, CredentialsError, Secret};
pub use error::{Fault, FaultClass, VsphereError};
pub use identity::{bios_uuid, mac, uuid_v5};
pub use metrics::VsphereMetrics;
pub use port::{
    Body, Cdrom, Change, Connect, File, Network, Object, Question, Site, SiteSpec, SiteVms, Store, TaskId,
    Vm, VmConfigSpec, VmDatastores, Vsphere, Wanted,
};
pub use soap::{SoapConnect, SoapOptions, SoapVsphere};
