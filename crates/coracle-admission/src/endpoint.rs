//! Address of the listener for the API server.

use k8s_openapi::ByteString;
use serde_json::{Value, json};

/// Name of the Service of the operator's replicas.
pub const SERVICE: &str = "coracle-webhook";

/// Address of the webhook for the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reach {
    /// At `https://HOST:PORT` of the listener: the API server and this process run on one host.
    Url {
        /// Name or address that the API server can dial.
        host: String,
    },
    /// Through a Service.
    Service {
        /// Namespace of the Service.
        namespace: String,
        /// Name of the Service.
        name: String,
        /// Port of the Service.
        port: u16,
    },
}

/// Address and trust anchors that the API server needs to call the listener.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Address of the listener.
    pub reach: Reach,
    /// Port of the listener.
    pub port: u16,
    /// PEM certificates of the authorities that may have signed the listener's certificate.
    pub ca_bundle: ByteString,
}

impl Endpoint {
    /// Returns the `clientConfig` of the webhook at a path (`admissionregistration.k8s.io/v1`).
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
