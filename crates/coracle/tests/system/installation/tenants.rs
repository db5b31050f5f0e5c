//! Two namespaces whose users do not trust each other: use of their own guests, and attempts to access the other's.

use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::time::Duration;

use coracle_api::subresources::{PROTOCOL, Subresource};
use coracle_proto::host as pb;
use coracle_proto::host::host_client::HostClient;
use coracle_streaming::{Handshake, Tunnel};
use coracle_testkit::registry::{DebianRegistry, LOGIN};
use coracle_testkit::{netns, tools};
use hyper_util::rt::TokioIo;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::process::Command;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use super::harness::{Installed, LIMIT, end};
use super::upgrade::admits;
use crate::crash_node::import;
use crate::support::{CORACLE, coracle_ok, registry_config, text, until};

/// A namespace, its user, and the name of its VM. Both VMs have the id `team-a-web`.
struct Tenant {
    namespace: &'static str,
    user: &'static str,
    vm: &'static str,
    kubeconfig: PathBuf,
}

impl Tenant {
    async fn coracle(&self, args: &[&str]) -> Output {
        self.coracle_in(self.namespace, args).await
    }

    async fn coracle_in(&self, namespace: &str, args: &[&str]) -> Output {
        let flags = ["--kubeconfig", self.kubeconfig.to_str().unwrap(), "-n", namespace];
        let mut command = Command::new(CORACLE);
        command.args([&args[..1], &flags, &args[1..]].concat()).env_remove("CORACLE_STATE");
        command.stdin(Stdio::null()).kill_on_drop(true).output().await.unwrap()
    }

    async fn ok(&self, args: &[&str]) -> String {
        let output = self.coracle(args).await;
        assert!(output.status.success(), "coracle {args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// Opens a session with a client of its own.
    async fn session(&self, namespace: &str, vm: &str, of: &str) -> Result<HostClient<Channel>, u16> {
        let file = kube::config::Kubeconfig::read_from(&self.kubeconfig).unwrap();
        let config = kube::Config::from_custom_kubeconfig(file, &Default::default()).await.unwrap();
        let client = kube::Client::try_from(config).unwrap();
        let handshake = Handshake::new(PROTOCOL);
        let path = Subresource::Exec.path(namespace, vm).replace("/exec", of);
        let mut request = http::Request::get(path).body(Body::empty()).unwrap();
        request.headers_mut().extend(handshake.headers());
        let answer = client.send(request).await.unwrap();
        if !handshake.is_accepted(&answer) {
            return Err(answer.status().as_u16());
        }
        let upgraded = hyper::upgrade::on(answer).await.unwrap();
        let mut tunnel = Some(TokioIo::new(Tunnel::client(TokioIo::new(upgraded)).await));
        let once = tower::service_fn(move |_| {
            std::future::ready(tunnel.take().ok_or_else(|| std::io::Error::other("one connection")))
        });
        Ok(HostClient::new(Endpoint::from_static("http://node").connect_with_connector(once).await.unwrap()))
    }
}

/// Returns the output of a process in the guest of a session; the call names `vm`.
async fn printed(session: &mut HostClient<Channel>, vm: &str) -> Result<String, Status> {
    let argv = ["/bin/busybox", "hostname"].map(str::to_owned).to_vec();
    let start = pb::ExecStart { vm: vm.to_owned(), argv, ..Default::default() };
    let start = pb::ExecRequest { message: Some(pb::exec_request::Message::Start(start)) };
    let mut answers = session.exec(tokio_stream::once(start)).await?.into_inner();
    let mut said = Vec::new();
    while let Some(answer) = answers.message().await? {
        if let Some(pb::exec_response::Message::Stdout(data)) = answer.message {
            said.extend(data);
        }
    }
    Ok(text(&said))
}

impl Installed {
    /// Creates a ServiceAccount with roles in its namespace only.
    async fn tenant(
        &self,
        namespace: &'static str,
        user: &'static str,
        vm: &'static str,
        roles: &[&str],
    ) -> Tenant {
        self.apply(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})).await;
        let account = json!({"name": user, "namespace": namespace});
        self.apply(json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})).await;
        for role in roles {
            self.apply(json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
                "metadata": {"name": format!("{user}-{role}"), "namespace": namespace},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                "subjects": [{"kind": "ServiceAccount", "name": user, "namespace": namespace}],
            }))
            .await;
        }
        let token = self.kubectl(&["create", "token", user, "-n", namespace]).await.unwrap();
        let mut config: Value = serde_json::to_value(self.cluster.config().unwrap()).unwrap();
        config["users"][0]["user"] = json!({"token": token.trim()});
        let kubeconfig = self.dir.path().join(format!("{user}.kubeconfig"));
        std::fs::write(&kubeconfig, config.to_string()).unwrap();
        Tenant { namespace, user, vm, kubeconfig }
    }

    /// Returns why a VM of a tenant does not become Ready, or is not stored.
    async fn refusal(&self, tenant: &Tenant, name: &str, fields: Value) -> String {
        let mut spec = json!({"image": "localhost/idle:1", "vcpuCount": 1, "memoryMB": 128});
        spec.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let vm = json!({
            "apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM", "metadata": {"name": name}, "spec": spec,
        });
        let file = self.dir.path().join("try.json");
        std::fs::write(&file, vm.to_string()).unwrap();
        let apply = ["apply", "-n", tenant.namespace, "-f", file.to_str().unwrap()];
        if let Err(refused) = self.kubectl_as(&tenant.kubeconfig, &apply).await {
            return refused;
        }
        let of = [name, "-n", tenant.namespace];
        let ready = "-o=jsonpath={.status.phase} {.status.conditions[?(@.type==\"Ready\")].message}";
        let why = until("a reason", LIMIT, || async {
            let said = self.kubectl(&[&["get", "mikromvm"], &of[..], &[ready]].concat()).await?;
            assert!(!said.starts_with("Running"), "{fields}: it runs");
            let (_, why) = said.split_once(' ').unwrap_or_default();
            let waits =
                ["", "VM is being created", "waiting"].iter().any(|w| why.trim().eq_ignore_ascii_case(w));
            if waits || said.starts_with("Creating") { Err(said) } else { Ok(why.to_owned()) }
        })
        .await;
        let delete = [&["delete", "mikromvm"], &of[..], &["--timeout=60s"]].concat();
        self.kubectl(&delete).await.unwrap();
        why
    }

    async fn runs(&self, tenant: &Tenant) {
        self.runs_with(tenant, json!({"image": "localhost/idle:1"})).await;
    }

    /// Creates a VM of a tenant with additional fields, and waits until it runs.
    async fn runs_with(&self, tenant: &Tenant, fields: Value) {
        let file = self.dir.path().join(format!("{}.json", tenant.user));
        let mut spec = json!({"vcpuCount": 1, "memoryMB": 128});
        spec.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let vm = json!({
            "apiVersion": "vm.mikrom.es/v1alpha1", "kind": "MikromVM", "metadata": {"name": tenant.vm}, "spec": spec,
        });
        std::fs::write(&file, vm.to_string()).unwrap();
        let apply = ["apply", "-n", tenant.namespace, "-f", file.to_str().unwrap()];
        self.kubectl_as(&tenant.kubeconfig, &apply).await.unwrap();
        until("a running VM", LIMIT * 2, || async {
            let phase = ["get", "mikromvm", tenant.vm, "-n", tenant.namespace, "-o=jsonpath={.status.phase}"];
            match self.kubectl_as(&tenant.kubeconfig, &phase).await?.as_str() {
                "Running" => Ok(()),
                other => Err(other.to_owned()),
            }
        })
        .await;
    }
}

#[test]
fn tenants_access_only_their_own_guests() {
    netns::run_within(Duration::from_secs(300), || async {
        let Some(mut installed) = Installed::plane().await else { return };
        let Some(registry) = private_registry(&mut installed) else { return };
        installed.install().await;
        installed.route_webhook().await;
        let account = installed.pod_kubeconfig("coracle-node", "n1").await;
        let mut processes =
            vec![installed.start_node("n1", &account).await, installed.start_operator().await];
        installed.announced("n1").await;
        admits(&installed).await;
        import(&installed.state("n1"), &installed.dir.path().join("layout")).await;
        let roles = ["coracle-view", "coracle-edit"];
        let anna = installed.tenant("team", "anna", "a-web", &roles).await;
        let ben = installed.tenant("team-a", "ben", "web", &roles).await;
        let reader = installed.tenant("team", "carl", "a-web", &["coracle-view"]).await;
        installed.runs(&anna).await;
        installed.runs(&ben).await;

        uses_its_guest(&installed, &anna).await;
        assert_eq!(ben.ok(&["exec", "web", "/bin/busybox", "hostname"]).await, "web\n");
        is_kept_out(&installed, &anna, &ben).await;
        only_reads(&installed, &reader).await;
        api_server_alone_is_answered(&installed, &anna).await;
        takes_nothing_of_others(&installed, &anna).await;
        pulls_by_its_own_secret_alone(&installed, &registry, [&anna, &ben]).await;
        for tenant in [&anna, &ben] {
            tenant.ok(&["rm", "--force", tenant.vm]).await;
        }
        end(&mut processes).await;
    });
}

async fn uses_its_guest(installed: &Installed, tenant: &Tenant) {
    let vm = tenant.vm;
    assert_eq!(tenant.ok(&["exec", vm, "/bin/busybox", "hostname"]).await, format!("{vm}\n"));
    let failed = tenant.coracle(&["exec", vm, "/bin/busybox", "sh", "-c", "exit 9"]).await;
    assert_eq!(failed.status.code(), Some(9));
    let file = installed.dir.path().join("note");
    std::fs::write(&file, "precious").unwrap();
    let there = format!("{vm}:/note");
    tenant.ok(&["cp", file.to_str().unwrap(), &there]).await;
    let back = installed.dir.path().join("back");
    tenant.ok(&["cp", &there, back.to_str().unwrap()]).await;
    assert_eq!(std::fs::read_to_string(back).unwrap(), "precious");
    let inspected: Value = serde_json::from_str(&tenant.ok(&["inspect", vm]).await).unwrap();
    assert!(inspected["status"]["vmmPid"].as_u64().unwrap() > 0, "the node was asked: {inspected}");
    tenant.ok(&["logs", vm]).await;
    assert!(
        tenant.ok(&["console", "--no-follow", vm]).await.contains("coracle-guest"),
        "the guest's console"
    );
    let serve = "echo precious > /index.html; /bin/busybox httpd -p 80 -h /";
    tenant.ok(&["exec", vm, "/bin/busybox", "sh", "-c", serve]).await;
    let forward =
        ["port-forward", "--kubeconfig", tenant.kubeconfig.to_str().unwrap(), "-n", tenant.namespace];
    let mut forward =
        Command::new(CORACLE).args(forward).args([vm, "18080:80"]).kill_on_drop(true).spawn().unwrap();
    until("the forwarded port", LIMIT, || async {
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let page = client.get("http://127.0.0.1:18080/").send().await.map_err(|error| error.to_string())?;
        match page.text().await.map_err(|error| error.to_string())?.as_str() {
            "precious\n" => Ok(()),
            other => Err(other.to_owned()),
        }
    })
    .await;
    forward.kill().await.unwrap();
    let log = Subresource::Log.path(tenant.namespace, vm);
    let raw = async |query: &str| {
        installed.kubectl_as(&tenant.kubeconfig, &["get", "--raw", &format!("{log}{query}")]).await
    };
    raw("?tailLines=1&timestamps=true").await.unwrap();
    let refused = raw("?tailLines=many").await.unwrap_err();
    assert!(refused.contains("BadRequest"), "{refused}");
}

async fn is_kept_out(installed: &Installed, tenant: &Tenant, other: &Tenant) {
    let refused = tenant.coracle_in(other.namespace, &["exec", other.vm, "/bin/busybox", "hostname"]).await;
    assert_eq!(refused.status.code(), Some(125), "{}", text(&refused.stderr));
    assert!(text(&refused.stderr).contains("error[COR-API-003]"), "{}", text(&refused.stderr));
    for one in Subresource::ALL {
        let path = one.path(other.namespace, other.vm);
        let refused = installed.kubectl_as(&tenant.kubeconfig, &["get", "--raw", &path]).await.unwrap_err();
        assert!(refused.contains("Forbidden"), "{path}: {refused}");
        let of = format!("/{}", one.name());
        assert_eq!(tenant.session(other.namespace, other.vm, &of).await.err(), Some(403), "{of}");
    }
    // A session belongs to the VM of its object, and allows only the calls of its subresource.
    let mut session = tenant.session(tenant.namespace, tenant.vm, "/exec").await.unwrap();
    for named in ["team-a-web", other.vm, ""] {
        assert_eq!(printed(&mut session, named).await.unwrap(), format!("{}\n", tenant.vm), "{named}");
    }
    let denied = |status: Status| assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    denied(session.list_vms(pb::ListVmsRequest {}).await.unwrap_err());
    let delete = pb::DeleteVmRequest { vm: "team-a-web".into(), force: true, ..Default::default() };
    denied(session.delete_vm(delete).await.unwrap_err());
    denied(session.logs(pb::LogsRequest::default()).await.unwrap_err());
    let mut session = tenant.session(tenant.namespace, tenant.vm, "/instance").await.unwrap();
    let get = pb::GetVmRequest { vm: "team-a-web".into(), ..Default::default() };
    let found = session.get_vm(get).await.unwrap().into_inner();
    assert_eq!(found.owner.unwrap().namespace, tenant.namespace);
}

async fn only_reads(installed: &Installed, reader: &Tenant) {
    reader.ok(&["logs", reader.vm]).await;
    reader.ok(&["inspect", reader.vm]).await;
    let refused = reader.coracle(&["exec", reader.vm, "/bin/busybox", "hostname"]).await;
    assert_eq!(refused.status.code(), Some(125), "{}", text(&refused.stderr));
    assert!(text(&refused.stderr).contains("error[COR-API-003]"), "{}", text(&refused.stderr));
    // To the API server a WebSocket is a GET, but exec requires more than that.
    installed
        .apply(json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "gets"},
            "rules": [{"apiGroups": ["subresources.coracle.dev"], "resources": ["mikromvms/exec"], "verbs": ["get"]}],
        }))
        .await;
    let getter = installed.tenant("team", "dora", "a-web", &["coracle-view", "gets"]).await;
    let refused = getter.coracle(&["exec", getter.vm, "/bin/busybox", "hostname"]).await;
    assert_eq!(refused.status.code(), Some(125), "{}", text(&refused.stderr));
    assert!(text(&refused.stderr).contains("error[COR-API-003]"), "{}", text(&refused.stderr));
    assert!(text(&refused.stderr).contains("cannot create resource"), "{}", text(&refused.stderr));
    assert_eq!(getter.session("team", "a-web", "/ex%65c").await.err(), Some(403), "an encoded path");
}

/// Checks fields of a MikromVM by which one namespace could access VMs of another, or the node.
async fn takes_nothing_of_others(installed: &Installed, tenant: &Tenant) {
    let node = installed.state("n1");
    // The VM of the other namespace has the same id, and so a different name on the node.
    let names = coracle_ok(&node, &["ps", "-a", "-o", "name"]).await;
    let other = names.lines().map(|line| line.trim_start_matches("vm/")).max_by_key(|name| name.len());
    let other = other.unwrap();
    assert!(other.starts_with("team-a-web-"), "{names}");
    coracle_ok(&node, &["snapshot", "save", other, "--name", "of-the-other"]).await;
    coracle_ok(&node, &["run", "--detach", "--name", "team-local", "--memory", "128", "localhost/idle:1"])
        .await;
    for (why, spec, want) in [
        ("a snapshot", json!({"cloneFrom": "of-the-other"}), "of-the-other"),
        ("an agent of its choice", json!({"agentAddress": "192.0.2.99:50051"}), "192.0.2.99:50051"),
        ("a file of the node", json!({"kernelPath": "/etc/shadow"}), "/etc/shadow"),
        ("a driver that is none", json!({"driver": "shell"}), "no driver shell"),
    ] {
        let refused = installed.refusal(tenant, "try", spec).await;
        assert!(refused.contains(want), "{why}: {refused}");
    }
    // This VM has the same id as a VM of the node's user, and so is another VM with a different name on the node.
    let (namespace, user, kubeconfig) = (tenant.namespace, tenant.user, tenant.kubeconfig.clone());
    let local = Tenant { namespace, user, vm: "local", kubeconfig };
    installed.runs(&local).await;
    assert_eq!(local.ok(&["exec", "local", "/bin/busybox", "hostname"]).await, "local\n");
    local.ok(&["rm", "--force", "local"]).await;
    let kept = coracle_ok(&node, &["ps", "-a", "-o", "name"]).await;
    assert!(kept.lines().any(|line| line.ends_with("team-local")) && kept.contains(other), "{kept}");
    coracle_ok(&node, &["rm", "--force", "team-local"]).await;
    coracle_ok(&node, &["snapshot", "rm", "of-the-other"]).await;
}

/// Starts a registry with a password, which the nodes may access. `None` with a printed reason if a program is missing.
fn private_registry(installed: &mut Installed) -> Option<DebianRegistry> {
    tools::require(["docker-registry", "skopeo"])?;
    let registry = DebianRegistry::start_with_password().unwrap();
    let config = registry_config(installed.dir.path(), &[&registry.address().to_string()]);
    installed.env.push(("CORACLE_REGISTRY_CONFIG", config));
    Some(registry)
}

/// Checks that an image that was pulled with the Secret of one namespace is not available to the other.
async fn pulls_by_its_own_secret_alone(
    installed: &Installed,
    registry: &DebianRegistry,
    [owner, other]: [&Tenant; 2],
) {
    let layout = installed.dir.path().join("layout");
    let image = registry.push(&layout, "1", "team/private:1", Some(LOGIN)).unwrap();
    let (user, password) = LOGIN.split_once(':').unwrap();
    let address = registry.address().to_string();
    let config = json!({"auths": {address: {"username": user, "password": password}}});
    let secret = |namespace: &str, config: Value| {
        json!({
            "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/dockerconfigjson",
            "metadata": {"name": "login", "namespace": namespace},
            "stringData": {".dockerconfigjson": config.to_string()},
        })
    };
    installed.apply(secret(owner.namespace, config)).await;
    let (namespace, user, kubeconfig) = (owner.namespace, owner.user, owner.kubeconfig.clone());
    let private = Tenant { namespace, user, vm: "private", kubeconfig };
    let with_secret = json!({"image": image, "imagePullSecrets": [{"name": "login"}]});
    installed.runs_with(&private, with_secret.clone()).await;
    for (why, fields, want) in [
        ("no Secret", json!({"image": image, "imagePullPolicy": "IfNotPresent"}), "denied by registry"),
        ("no question", json!({"image": image, "imagePullPolicy": "Never"}), "the credentials of another"),
        ("the Secret of the other", with_secret.clone(), "login"),
    ] {
        let refused = installed.refusal(other, "try", fields).await;
        assert!(refused.contains(want), "{why}: {refused}");
    }
    let guessed =
        json!({"auths": {registry.address().to_string(): {"username": "user", "password": "guess"}}});
    installed.apply(secret(other.namespace, guessed)).await;
    let refused = installed.refusal(other, "try", with_secret).await;
    assert!(refused.contains("denied by registry"), "a wrong password: {refused}");
    private.ok(&["rm", "--force", "private"]).await;
}

/// Checks that the operator answers only the API server.
async fn api_server_alone_is_answered(installed: &Installed, tenant: &Tenant) {
    let url = format!("https://192.0.2.10:9443{}", Subresource::Log.path(tenant.namespace, tenant.vm));
    let own = std::fs::read(installed.state("n1").join("certificates/node.pem")).unwrap();
    for (who, identity) in [("without a certificate", None), ("with that of a node", Some(own))] {
        let mut client = reqwest::Client::builder().danger_accept_invalid_certs(true).no_proxy();
        if let Some(pem) = identity {
            client = client.identity(reqwest::Identity::from_pem(&pem).unwrap());
        }
        let user = format!("system:serviceaccount:{}:{}", tenant.namespace, tenant.user);
        let request = client.build().unwrap().get(&url).header("X-Remote-User", user);
        let answer = request.header("X-Remote-Group", "system:masters").send().await.unwrap();
        assert_eq!(answer.status().as_u16(), 401, "{who}");
    }
}
