//! VMs of a cluster: MikromVM objects, and the nodes that announce themselves by Leases.

use coracle_api::MikromVM;
use coracle_api::keys::{NODE_NAMESPACE, node as keys};
use coracle_api::subresources::Subresource;
use coracle_proto::host as pb;
use coracle_proto::host::host_client::HostClient;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::events::v1::Event;
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Api, Client, Config, ResourceExt};
use tonic::transport::Channel;

use crate::api_failure::{chain, request_failure};
use crate::cli::Global;
use crate::client::{NameMatch, with_hint};
use crate::error::{Failure, exit};
use crate::{suggest, tunnel};

/// Maximum number of events that are read.
const EVENTS_MAX: u32 = 1000;

/// Returns a client of the cluster that the flags name, else of the kubeconfig's current context. Sends no request yet.
///
/// # Errors
/// The kubeconfig is unusable.
pub async fn connect(global: &Global) -> Result<Client, Failure> {
    Cluster::open(global).await.map(|cluster| cluster.client)
}

/// Cluster that the flags select.
pub(crate) struct Cluster {
    pub(crate) client: Client,
    namespace: String,
    all: bool,
}

impl Cluster {
    /// Reads the kubeconfig, or the service account of the Pod, and makes a client. Sends no request yet.
    pub(crate) async fn open(global: &Global) -> Result<Self, Failure> {
        let unusable = |why: String| {
            Failure::new("COR-CLI-010", format!("use the kubeconfig: {why}"))
                .help("name another with --kubeconfig FILE or $KUBECONFIG, or another --context")
                .exit(exit::USAGE)
        };
        let options = KubeConfigOptions { context: global.context.clone(), ..KubeConfigOptions::default() };
        let file = match &global.kubeconfig {
            Some(path) => Kubeconfig::read_from(path),
            None => Kubeconfig::read(),
        };
        // Without a kubeconfig, a Pod means its own cluster, as with kubectl. A kubeconfig that is named or broken is an error
        // there, too.
        let names_none = global.kubeconfig.is_none() && global.context.is_none();
        let is_in_pod = names_none
            && std::env::var_os("KUBECONFIG").is_none()
            && std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
        let config = match file {
            Ok(file) => {
                Config::from_custom_kubeconfig(file, &options).await.map_err(|e| unusable(chain(&e)))?
            }
            Err(KubeconfigError::FindPath | KubeconfigError::ReadConfig(..)) if is_in_pod => {
                Config::incluster()
                    .map_err(|e| unusable(format!("none, and no account of a Pod: {}", chain(&e))))?
            }
            Err(e) => return Err(unusable(chain(&e))),
        };
        let namespace = global.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config).map_err(|e| unusable(chain(&e)))?;
        Ok(Self { client, namespace, all: global.all_namespaces })
    }

    /// Namespace from the flags or the kubeconfig.
    pub(crate) fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Returns the API of another kind in that namespace.
    pub(crate) fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Returns the API of the MikromVMs that the flags select.
    pub(crate) fn vms(&self) -> Api<MikromVM> {
        if self.all {
            Api::all(self.client.clone())
        } else {
            Api::namespaced(self.client.clone(), &self.namespace)
        }
    }

    /// Returns the API of MikromVMs in the namespace of `vm`.
    pub(crate) fn namespaced_api(&self, vm: &MikromVM) -> Api<MikromVM> {
        Api::namespaced(self.client.clone(), &vm.namespace().unwrap_or_default())
    }

    /// Lists the VMs, sorted by namespace and name.
    pub(crate) async fn list(&self) -> Result<Vec<MikromVM>, Failure> {
        let found = self
            .vms()
            .list(&ListParams::default())
            .await
            .map_err(|e| request_failure("list MikromVMs", &e))?;
        let mut vms = found.items;
        vms.sort_by_key(|vm| (vm.namespace(), vm.name_any()));
        Ok(vms)
    }

    /// Returns one VM by exact name or, if `named` allows it, by unique prefix. The error of a miss suggests the nearest names.
    pub(crate) async fn get(&self, name: &str, named: NameMatch) -> Result<MikromVM, Failure> {
        let all = self.list().await?;
        let called = |test: &dyn Fn(&str) -> bool| -> Vec<&MikromVM> {
            all.iter().filter(|vm| test(&vm.name_any()) || test(&vm.vm_id())).collect()
        };
        let exact = called(&|known| known == name);
        let found = match named {
            NameMatch::Prefix if exact.is_empty() => called(&|known| known.starts_with(name)),
            NameMatch::Prefix | NameMatch::Exact => exact,
        };
        match found.as_slice() {
            [one] => Ok((*one).clone()),
            [] => {
                let place =
                    if self.all { "the cluster".to_owned() } else { format!("namespace {}", self.namespace) };
                let names: Vec<_> = all.iter().map(ResourceExt::name_any).collect();
                let near = suggest::hint(name, names.iter().map(String::as_str));
                let failure = Failure::new("COR-VM-001", format!("MikromVM {name} not found in {place}"))
                    .help("list what there is: coracle ps -a, with -n NAMESPACE or -A")
                    .exit(exit::NOT_FOUND);
                Err(with_hint(failure, near))
            }
            several => {
                let names: Vec<_> = several.iter().map(|vm| vm.vm_id()).collect();
                let message = format!("{name} is ambiguous: {}", names.join(", "));
                Err(Failure::new("COR-VM-002", message).exit(exit::USAGE))
            }
        }
    }

    /// Lists the Leases of nodes. Empty for a user who may not read them.
    pub(crate) async fn nodes(&self) -> Vec<Lease> {
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), NODE_NAMESPACE);
        let labelled = ListParams::default().labels(&format!("{}=true", keys::AGENT_LABEL));
        leases.list(&labelled).await.map(|list| list.items).unwrap_or_default()
    }

    /// Connects to the node of a VM for the calls of one subresource. Calls apply to that VM even if they name another one.
    pub(crate) async fn reach(
        &self,
        vm: &MikromVM,
        subresource: Subresource,
    ) -> Result<HostClient<Channel>, Failure> {
        let status = vm.status.as_ref();
        if status.is_none_or(|status| status.node_name.is_empty() && status.agent_address.is_empty()) {
            let why = format!("MikromVM {} is on no node yet", vm.name_any());
            let help = format!("see why: coracle explain {}", vm.name_any());
            return Err(Failure::new("COR-CLI-012", why).help(help));
        }
        tunnel::open(&self.client, vm, subresource).await
    }

    /// Returns a connection to the node of an object's VM, and the VM as the node reports it.
    pub(crate) async fn instance(&self, vm: &MikromVM) -> Result<(HostClient<Channel>, pb::Vm), Failure> {
        let mut node = self.reach(vm, Subresource::Instance).await?;
        let found = node.get_vm(pb::GetVmRequest { vm: vm.vm_id(), exact: true, ..Default::default() });
        let found = found.await.map_err(Failure::from)?.into_inner();
        Ok((node, found))
    }

    /// Lists events about MikromVMs, oldest first.
    pub(crate) async fn events(&self) -> Result<Vec<Event>, Failure> {
        let api: Api<Event> = if self.all {
            Api::all(self.client.clone())
        } else {
            Api::namespaced(self.client.clone(), &self.namespace)
        };
        let found = api.list(&ListParams::default().limit(EVENTS_MAX)).await;
        let mut events = found.map_err(|e| request_failure("list events", &e))?.items;
        events.retain(|e| e.regarding.as_ref().and_then(|r| r.kind.as_deref()) == Some("MikromVM"));
        events.sort_by_key(time);
        Ok(events)
    }
}

/// Returns the time when an event was last seen.
pub(crate) fn time(event: &Event) -> Option<jiff::Timestamp> {
    let series = event.series.as_ref().map(|s| s.last_observed_time.0);
    series
        .or(event.event_time.as_ref().map(|t| t.0))
        .or(event.deprecated_last_timestamp.as_ref().map(|t| t.0))
}
