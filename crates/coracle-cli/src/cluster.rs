//! VMs through a cluster: MikromVM objects, and the nodes that their Leases announce.

use std::time::Duration;

use coracle_api::MikromVM;
use coracle_api::keys::{CLIENT_SECRET, NODE_NAMESPACE, SYSTEM_NAMESPACE, node as keys};
use coracle_proto::host as pb;
use coracle_proto::host::host_client::HostClient;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::events::v1::Event;
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, ResourceExt};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use crate::cli::Global;
use crate::client::{Named, with_hint};
use crate::error::{Failure, exit};
use crate::suggest;

/// Limit for a node to answer.
const DIAL: Duration = Duration::from_secs(5);

/// Most events that are looked through.
const EVENTS_MAX: u32 = 1000;

/// A client of the cluster that the flags name, else of the kubeconfig's current context. Nothing is asked yet.
///
/// # Errors
/// When the kubeconfig cannot be used.
pub async fn connect(global: &Global) -> Result<Client, Failure> {
    Cluster::open(global).await.map(|cluster| cluster.client)
}

/// A cluster, as the flags name it.
pub(crate) struct Cluster {
    pub(crate) client: Client,
    namespace: String,
    all: bool,
}

impl Cluster {
    /// Reads the kubeconfig and makes a client. Nothing is asked yet.
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
        let file = file.map_err(|e| unusable(chain(&e)))?;
        let config = Config::from_custom_kubeconfig(file, &options).await.map_err(|e| unusable(chain(&e)))?;
        let namespace = global.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config).map_err(|e| unusable(chain(&e)))?;
        Ok(Self { client, namespace, all: global.all_namespaces })
    }

    /// The namespace that the flags or the kubeconfig mean.
    pub(crate) fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Objects of another kind in that namespace.
    pub(crate) fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// The objects that the flags mean.
    pub(crate) fn vms(&self) -> Api<MikromVM> {
        if self.all {
            Api::all(self.client.clone())
        } else {
            Api::namespaced(self.client.clone(), &self.namespace)
        }
    }

    /// The objects of one VM's namespace.
    pub(crate) fn beside(&self, vm: &MikromVM) -> Api<MikromVM> {
        Api::namespaced(self.client.clone(), &vm.namespace().unwrap_or_default())
    }

    /// Every VM, by namespace and name.
    pub(crate) async fn list(&self) -> Result<Vec<MikromVM>, Failure> {
        let found = self.vms().list(&ListParams::default()).await.map_err(|e| asked("list MikromVMs", &e))?;
        let mut vms = found.items;
        vms.sort_by_key(|vm| (vm.namespace(), vm.name_any()));
        Ok(vms)
    }

    /// One VM by exact name, then, where that is allowed, by unique prefix; on a miss the nearest names.
    pub(crate) async fn get(&self, name: &str, named: Named) -> Result<MikromVM, Failure> {
        let all = self.list().await?;
        let called = |test: &dyn Fn(&str) -> bool| -> Vec<&MikromVM> {
            all.iter().filter(|vm| test(&vm.name_any()) || test(&vm.vm_id())).collect()
        };
        let exact = called(&|known| known == name);
        let found = match named {
            Named::Prefix if exact.is_empty() => called(&|known| known.starts_with(name)),
            Named::Prefix | Named::Exact => exact,
        };
        match found.as_slice() {
            [one] => Ok((*one).clone()),
            [] => {
                let place =
                    if self.all { "the cluster".to_owned() } else { format!("namespace {}", self.namespace) };
                let names: Vec<_> = all.iter().map(ResourceExt::name_any).collect();
                let near = suggest::sentence(name, names.iter().map(String::as_str));
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

    /// Leases of nodes. Empty for a user who may not read them.
    pub(crate) async fn nodes(&self) -> Vec<Lease> {
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), NODE_NAMESPACE);
        let labelled = ListParams::default().labels(&format!("{}=true", keys::AGENT_LABEL));
        leases.list(&labelled).await.map(|list| list.items).unwrap_or_default()
    }

    /// A connection to the node that runs the VM, and the VM as that node knows it.
    pub(crate) async fn reach(&self, vm: &MikromVM) -> Result<(HostClient<Channel>, pb::Vm), Failure> {
        let nodes = self.nodes().await;
        let (name, address, server) = node_address(vm, &nodes)?;
        let mut node = self.dial(&name, &address, &server).await?;
        let request = pb::GetVmRequest { vm: vm.vm_id(), exact: true, ..Default::default() };
        let named = node.get_vm(request).await.map(tonic::Response::into_inner);
        if let Ok(found) = &named
            && is_of(found, vm)
        {
            return Ok((node, found.clone()));
        }
        // Another VM has the name; that of the object has a name of its own.
        let all = node.list_vms(pb::ListVmsRequest {}).await.map_err(Failure::from)?.into_inner().vms;
        if let Some(found) = all.into_iter().find(|found| is_of(found, vm)) {
            return Ok((node, found));
        }
        named.map_err(Failure::from)?;
        let message = format!("VM {} on node {name} belongs to another object", vm.vm_id());
        Err(Failure::new("COR-VM-006", message).exit(exit::CONFLICT))
    }

    async fn dial(&self, node: &str, address: &str, server: &str) -> Result<HostClient<Channel>, Failure> {
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), SYSTEM_NAMESPACE);
        let secret = secrets.get(CLIENT_SECRET).await.map_err(|e| {
            asked(&format!("read Secret {SYSTEM_NAMESPACE}/{CLIENT_SECRET}, which opens nodes"), &e)
        })?;
        let data = secret.data.unwrap_or_default();
        let pem = |key: &str| data.get(key).map(|bytes| bytes.0.clone()).unwrap_or_default();
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(pem("ca.crt")))
            .identity(Identity::from_pem(pem("tls.crt"), pem("tls.key")))
            .domain_name(server);
        let silent = |e: tonic::transport::Error| {
            Failure::new("COR-CLI-011", format!("node {node} does not answer at {address}: {}", chain(&e)))
                .help("it must be up, and this machine must be able to reach it")
        };
        let channel = Endpoint::new(format!("https://{address}"))
            .and_then(|e| e.tls_config(tls))
            .map_err(silent)?
            .connect_timeout(DIAL)
            .connect()
            .await
            .map_err(silent)?;
        Ok(HostClient::new(channel).max_decoding_message_size(16 << 20))
    }

    /// Events about MikromVMs, oldest first.
    pub(crate) async fn events(&self) -> Result<Vec<Event>, Failure> {
        let api: Api<Event> = if self.all {
            Api::all(self.client.clone())
        } else {
            Api::namespaced(self.client.clone(), &self.namespace)
        };
        let found = api.list(&ListParams::default().limit(EVENTS_MAX)).await;
        let mut events = found.map_err(|e| asked("list events", &e))?.items;
        events.retain(|e| e.regarding.as_ref().and_then(|r| r.kind.as_deref()) == Some("MikromVM"));
        events.sort_by_key(time);
        Ok(events)
    }
}

/// When an event was last seen.
pub(crate) fn time(event: &Event) -> Option<jiff::Timestamp> {
    let series = event.series.as_ref().map(|s| s.last_observed_time.0);
    series
        .or(event.event_time.as_ref().map(|t| t.0))
        .or(event.deprecated_last_timestamp.as_ref().map(|t| t.0))
}

/// The node made the VM for this object.
fn is_of(found: &pb::Vm, vm: &MikromVM) -> bool {
    let uid = found.owner.as_ref().map_or("", |owner| owner.uid.as_str());
    !uid.is_empty() && vm.metadata.uid.as_deref() == Some(uid)
}

/// Name, address and certificate name of the node that a VM is bound to. Pure.
fn node_address(vm: &MikromVM, nodes: &[Lease]) -> Result<(String, String, String), Failure> {
    let status = vm.status.clone().unwrap_or_default();
    let said = |lease: &Lease, key: &str| lease.annotations().get(key).cloned().unwrap_or_default();
    let name_of = |lease: &Lease| match said(lease, keys::NODE) {
        name if name.is_empty() => lease.name_any(),
        name => name,
    };
    let nowhere = |why: String, help: &str| Failure::new("COR-CLI-012", why).help(help);
    if status.node_name.is_empty() && status.agent_address.is_empty() {
        let why = format!("MikromVM {} is on no node yet", vm.name_any());
        return Err(nowhere(why, &format!("see why: coracle explain {}", vm.name_any())));
    }
    let lease = nodes.iter().find(|lease| {
        (!status.node_name.is_empty() && name_of(lease) == status.node_name)
            || (!status.agent_address.is_empty() && said(lease, keys::AGENT_ADDRESS) == status.agent_address)
    });
    let shown = if status.node_name.is_empty() { &status.agent_address } else { &status.node_name };
    let Some(lease) = lease else {
        let why = format!("node {shown} is not announced in {NODE_NAMESPACE}");
        return Err(nowhere(
            why,
            "agents that are not ours cannot exec; ours announce themselves by a Lease",
        ));
    };
    let address = said(lease, keys::HOST_ADDRESS);
    if address.is_empty() {
        return Err(nowhere(
            format!("node {shown} serves no command line to the cluster"),
            "start it with --host-listen",
        ));
    }
    let server = match said(lease, keys::TLS_SERVER_NAME) {
        name if name.is_empty() => address.rsplit_once(':').map_or_else(String::new, |(h, _)| h.to_owned()),
        name => name,
    };
    Ok((name_of(lease), address, server.trim_matches(['[', ']']).to_owned()))
}

/// The failure of a question to the API server.
pub(crate) fn asked(what: &str, error: &kube::Error) -> Failure {
    let (code, exit) = match error {
        kube::Error::Api(status) if status.code == 404 => ("COR-API-002", exit::NOT_FOUND),
        kube::Error::Api(status) if status.code == 403 || status.code == 401 => {
            ("COR-API-003", exit::FORBIDDEN)
        }
        kube::Error::Api(status) if status.code == 409 => ("COR-API-004", exit::CONFLICT),
        _ => ("COR-API-001", exit::FAILED),
    };
    let failure =
        Failure::new(code, crate::error::printable(&format!("{what}: {}", chain(error)))).exit(exit);
    match is_missing_kind(error) {
        true => failure.help("the cluster does not know the kind: coracle crd print | kubectl apply -f -"),
        false => failure,
    }
}

/// The API server answers for a kind that is not installed with a 404 that names no object.
fn is_missing_kind(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else { return false };
    let named = status.details.as_ref().is_some_and(|details| !details.name.is_empty());
    status.code == 404 && !named
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let words = cause.to_string();
        if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use coracle_api::MikromVMStatus;
    use serde_json::json;

    use super::*;

    fn lease(name: &str, annotations: serde_json::Value) -> Lease {
        serde_json::from_value(json!({"metadata": {"name": name, "annotations": annotations}})).unwrap()
    }

    #[test]
    fn missing_kind_is_told_with_the_command_that_installs_it() {
        let status = kube::core::Status {
            message: "404 page not found".into(),
            reason: "NotFound".into(),
            code: 404,
            ..kube::core::Status::default()
        };
        let failure = asked("list MikromVMs", &kube::Error::Api(Box::new(status.clone())));
        assert!(failure.help.is_some_and(|help| help.contains("coracle crd print")));
        let details = serde_json::from_value(serde_json::json!({"name": "web"})).unwrap();
        let absent = kube::core::Status { details: Some(details), ..status };
        assert!(asked("get web", &kube::Error::Api(Box::new(absent))).help.is_none());
    }

    fn vm(node: &str, agent: &str) -> MikromVM {
        let mut vm = MikromVM::new("web", Default::default());
        vm.status = Some(MikromVMStatus {
            node_name: node.into(),
            agent_address: agent.into(),
            ..MikromVMStatus::default()
        });
        vm
    }

    #[test]
    fn vm_leads_to_the_address_of_its_node() {
        let nodes = [
            lease("w1", json!({keys::AGENT_ADDRESS: "10.0.0.1:50051"})),
            lease(
                "lease-2",
                json!({keys::NODE: "w2", keys::AGENT_ADDRESS: "10.0.0.2:50051", keys::HOST_ADDRESS: "10.0.0.2:50052"}),
            ),
            lease("w3", json!({keys::HOST_ADDRESS: "[::1]:7", keys::TLS_SERVER_NAME: "w3.example"})),
            lease("w4", json!({keys::HOST_ADDRESS: "[::1]:8"})),
        ];
        let names =
            |node: &str, address: &str, server: &str| Ok((node.into(), address.into(), server.into()));
        for (vm, want) in [
            (vm("w2", ""), names("w2", "10.0.0.2:50052", "10.0.0.2")),
            (vm("", "10.0.0.2:50051"), names("w2", "10.0.0.2:50052", "10.0.0.2")),
            (vm("w3", ""), names("w3", "[::1]:7", "w3.example")),
            (vm("w4", ""), names("w4", "[::1]:8", "::1")),
            (vm("", ""), Err("on no node yet")),
            (vm("w1", ""), Err("serves no command line")),
            (vm("w9", ""), Err("not announced")),
        ] {
            let want: Result<(String, String, String), &str> = want;
            match (node_address(&vm, &nodes), want) {
                (Ok(got), Ok(want)) => assert_eq!(got, want),
                (Err(got), Err(want)) => assert!(got.message.contains(want), "{got}"),
                (got, want) => panic!("{got:?}, not {want:?}"),
            }
        }
    }
}
