//! Access of a daemon to its cluster.

use std::path::Path;

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use miette::{IntoDiagnostic, WrapErr};

/// Returns a client of a cluster; `None` if the flags name no cluster.
pub(crate) async fn client(kubeconfig: Option<&Path>, in_cluster: bool) -> miette::Result<Option<Client>> {
    config(kubeconfig, in_cluster).await?.map(Client::try_from).transpose().into_diagnostic()
}

/// Returns the configuration of a client; `None` if the flags name no cluster.
pub(crate) async fn config(kubeconfig: Option<&Path>, in_cluster: bool) -> miette::Result<Option<Config>> {
    match kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path).into_diagnostic().wrap_err("read the kubeconfig")?;
            let options = KubeConfigOptions::default();
            Config::from_custom_kubeconfig(file, &options).await.map(Some).into_diagnostic()
        }
        None if in_cluster => Config::incluster().map(Some).into_diagnostic(),
        None => Ok(None),
    }
}
