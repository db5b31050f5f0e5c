//! Where the API server reaches us.

use k8s_openapi::ByteString;
use serde_json::{Value, json};

/// Name of the Service before the operator's replicas.
pub const SERVICE: &str = "coracle-webhook";

/// Address of the webhook for the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reach {
    /// At `https://HOST:PORT` of the listener: the API server and we are on one machine.
    Url {
        /// A name or address that the API server can dial.
        host: String,
    },
    /// Through a Service.
    Service {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// Its port.
        port: u16,
    },
}

/// What the API server must know to reach the listener and to trust it.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Address.
    pub reach: Reach,
    /// Port of the listener.
    pub port: u16,
    /// PEM of the authorities that may have signed its certificate.
    pub ca_bundle: ByteString,
}

impl Endpoint {
    /// `clientConfig` of the webhook at a path (`admissionregistration.k8s.io/v1`).
    #[must_use]
    pub fn client_config(&self, path: &str) -> Value {
        match &self.reach {
            Reach::Url { host } => {
                json!({"caBundle": self.ca_bundle, "url": format!("https://{host}:{}{path}", self.port)})
            }
            Reach::Service { namespace, name, port } => {
                let service = json!({"namespace": namespace, "name": name, "port": port, "path": path});
                json!({"caBundle": self.ca_bundle, "service": service})
            }
        }
    }
}
