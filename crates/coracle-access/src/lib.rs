//! Authentication of the users of requests, and their authorization by the API server.
//!
//! ```text
//! TLS handshake: AnyCertificate takes every certificate whose key the client has
//!       └─▶ request: ClientCa ─▶ User of the certificate           (virtual node)
//!                    FrontProxy ─▶ User that the API server names  (extension API)
//!                    Reviews ─▶ User of a token;  whether an Access is allowed     Cache: answers for a while
//! ```
//!
//! Sources: Kubernetes documentation, "Authenticating", "Authorization", "Configure the Aggregation Layer".

mod api_server;
mod cache;
mod certificate;
mod front_proxy;
mod reviews;
mod user;

pub use api_server::{review_access, review_token};
pub use cache::Cache;
pub use certificate::{AnyCertificate, ClientCa, InvalidClientCa, PeerCertificates};
pub use front_proxy::{FrontProxy, FrontProxyError};
pub use reviews::{Access, KubeReviews, ReviewError, Reviews};
pub use user::User;
