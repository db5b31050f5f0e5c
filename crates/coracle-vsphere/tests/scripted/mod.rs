//! Behaviour that the vCenter simulator lacks, from a server with scripted answers.

mod uploads;

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use coracle_testkit::netns;
use coracle_vsphere::{
    Credentials, FaultClass, Network, Object, Site, SoapOptions, SoapVsphere, Store, TaskId, VmDatastores,
    Vsphere as _, VsphereError, VsphereMetrics, Wanted,
};
use coracle_vsphere_testing::{ScriptedCall, ScriptedReply, ScriptedVcenter};

use crate::support::{site_spec, vm_spec};

fn credentials(server: &ScriptedVcenter) -> Credentials {
    let data = [("server", server.url()), ("username", "user".into()), ("password", "pass".into())];
    Credentials::parse(&data.into_iter().map(|(k, v)| (k.to_owned(), v.into_bytes())).collect()).unwrap()
}

async fn client(server: &ScriptedVcenter, change: impl FnOnce(&mut SoapOptions)) -> SoapVsphere {
    let ms = Duration::from_millis;
    let mut options = SoapOptions {
        coalesce: ms(10),
        call: Duration::from_secs(5),
        task_check: ms(300),
        task: ms(1500),
        ..SoapOptions::default()
    };
    change(&mut options);
    SoapVsphere::open(&credentials(server), options, VsphereMetrics::default()).await.unwrap()
}

fn site() -> Site {
    let store = |name: &str| Store { object: Object::new("Datastore", name), name: name.into() };
    Site {
        spec: site_spec(),
        datacenter: Object::new("Datacenter", "dc-1"),
        folder: Object::new("Folder", "group-v1"),
        folder_path: "DC0/vm/demo".into(),
        pool: Object::new("ResourcePool", "rp-1"),
        storage: VmDatastores::Single(store("ds-1")),
        iso: store("ds-1"),
        network: Network::Standard { object: Object::new("Network", "n-1"), name: "VM Network".into() },
    }
}

/// Object of a `RetrievePropertiesEx` answer.
fn object(kind: &str, id: &str, properties: &[(&str, &str)], missing: &[(&str, &str)]) -> String {
    let set: Vec<_> = properties
        .iter()
        .map(|(name, value)| format!("<propSet><name>{name}</name><val>{value}</val></propSet>"))
        .collect();
    let missing: Vec<_> = missing
        .iter()
        .map(|(path, fault)| {
            format!(
                "<missingSet><path>{path}</path><fault><fault xsi:type=\"{fault}\"><privilegeId>System.Read\
                 </privilegeId></fault><localizedMessage>x</localizedMessage></fault></missingSet>"
            )
        })
        .collect();
    format!(
        "<returnval><objects><obj type=\"{kind}\">{id}</obj>{}{}</objects></returnval>",
        set.concat(),
        missing.concat()
    )
}

fn run<Fut: Future<Output = anyhow::Result<()>>>(
    script: impl Fn(&ScriptedCall) -> Option<ScriptedReply> + Send + Sync + 'static,
    body: impl FnOnce(ScriptedVcenter) -> Fut + Send,
) {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    netns::run(move || async move { body(ScriptedVcenter::start(script).await?).await });
}

fn task_read(call: &ScriptedCall) -> bool {
    call.method == "RetrievePropertiesEx" && call.body.contains(">task-1<")
}

#[test]
fn task_whose_end_the_long_poll_missed_is_read() {
    let script = |call: &ScriptedCall| {
        let state = [("info.state", "success")];
        task_read(call).then(|| ScriptedReply::Xml(object("Task", "task-1", &state, &[])))
    };
    run(script, |server| async move {
        let client = client(&server, |_| {}).await;
        let ended =
            tokio::time::timeout(Duration::from_secs(10), client.wait_task(&TaskId("task-1".into()))).await?;
        assert_eq!(ended?, None);
        assert!(server.count("CreateListView") <= 2, "the list is made anew once");
        client.close().await;
        Ok(())
    });
}

#[test]
fn task_that_never_ends_is_an_error_after_the_limit() {
    let script = |call: &ScriptedCall| {
        let state = [("info.state", "running"), ("info.progress", "43")];
        task_read(call).then(|| ScriptedReply::Xml(object("Task", "task-1", &state, &[])))
    };
    run(script, |server| async move {
        let client = client(&server, |_| {}).await;
        let ended =
            tokio::time::timeout(Duration::from_secs(10), client.wait_task(&TaskId("task-1".into()))).await?;
        let error = ended.unwrap_err();
        assert!(
            matches!(&error, VsphereError::TaskRuns { state, .. } if state == "running, 43 %"),
            "{error}"
        );
        assert_eq!(error.class(), FaultClass::Other);
        client.close().await;
        Ok(())
    });
}

/// Answers of a search that finds `vm-7` by its UUID, with `properties`.
fn finds(
    properties: &'static [(&str, &str)],
    missing: &'static [(&str, &str)],
) -> impl Fn(&ScriptedCall) -> Option<ScriptedReply> + Send + Sync + 'static {
    move |call| match call.method.as_str() {
        "FindAllByUuid" => {
            Some(ScriptedReply::Xml("<returnval type=\"VirtualMachine\">vm-7</returnval>".into()))
        }
        "RetrievePropertiesEx" => {
            Some(ScriptedReply::Xml(object("VirtualMachine", "vm-7", properties, missing)))
        }
        _ => None,
    }
}

fn wanted() -> Wanted {
    Wanted { uuids: vec![vm_spec("w-0", 1).uuid], ..Wanted::default() }
}

#[test]
fn inaccessible_vm_is_found_and_marked_unreadable() {
    let script =
        finds(&[("name", "/vmfs/volumes/x/w-0.vmx"), ("runtime.connectionState", "inaccessible")], &[]);
    run(script, |server| async move {
        let client = client(&server, |_| {}).await;
        let found = client.find(&site(), &wanted()).await?;
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].unreadable.as_str(), found[0].uuid.as_str()), ("inaccessible", ""));
        client.close().await;
        Ok(())
    });
}

#[test]
fn vm_without_configuration_is_unreadable() {
    run(finds(&[("name", "w-0"), ("runtime.connectionState", "connected")], &[]), |server| async move {
        let client = client(&server, |_| {}).await;
        let found = client.find(&site(), &wanted()).await?;
        assert_eq!(found[0].unreadable, "without configuration");
        client.close().await;
        Ok(())
    });
}

#[test]
fn property_without_permission_is_an_error_that_names_it() {
    run(finds(&[("name", "w-0")], &[("config.annotation", "NoPermission")]), |server| async move {
        let client = client(&server, |_| {}).await;
        let error = client.find(&site(), &wanted()).await.unwrap_err();
        assert_eq!(error.class(), FaultClass::Auth);
        let text = error.to_string();
        assert!(text.contains("config.annotation of VirtualMachine vm-7: NoPermission"), "{text}");
        assert!(text.contains("System.Read"), "{text}");
        client.close().await;
        Ok(())
    });
}

#[test]
fn tag_that_cannot_be_attached_is_an_error() {
    let script = |call: &ScriptedCall| {
        match call.method.as_str() {
        "POST /api/session" => Some(ScriptedReply::Http(201, "\"token\"".into())),
        method if method.starts_with("POST /api/cis/tagging/tag-association/") => Some(ScriptedReply::Http(
            400,
            r#"{"error_type":"INVALID_ARGUMENT","messages":[{"default_message":"not associable with VirtualMachine"}]}"#.into(),
        )),
        _ => None,
    }
    };
    run(script, |server| async move {
        let client = client(&server, |_| {}).await;
        let tags = ["urn:vmomi:InventoryServiceTag:1:GLOBAL".to_owned()];
        let error = client.attach_tags(&Object::new("VirtualMachine", "vm-7"), &tags).await.unwrap_err();
        assert_eq!(error.class(), FaultClass::Config);
        assert!(error.to_string().contains("INVALID_ARGUMENT: not associable"), "{error}");
        client.close().await;
        Ok(())
    });
}

#[test]
fn search_without_a_result_is_an_error() {
    let script = |call: &ScriptedCall| match call.method.as_str() {
        "SearchDatastore_Task" => {
            Some(ScriptedReply::Xml("<returnval type=\"Task\">task-9</returnval>".into()))
        }
        "ModifyListView" => Some(ScriptedReply::Xml("<returnval type=\"Task\">task-9</returnval>".into())),
        "RetrievePropertiesEx" => {
            let browser =
                "</val></propSet><propSet><name>browser</name><val type=\"HostDatastoreBrowser\">b-1";
            let name = format!("ds-1{browser}");
            Some(ScriptedReply::Xml(object("Datastore", "ds-1", &[("name", &name)], &[])))
        }
        _ => None,
    };
    run(script, |server| async move {
        let client = client(&server, |_| {}).await;
        let error = client.files(&site(), "isos", "*.iso").await.unwrap_err();
        assert!(error.to_string().contains("the task has no result"), "{error}");
        client.close().await;
        Ok(())
    });
}

#[test]
fn creation_names_a_host_that_mounts_the_datastore() {
    static CREATES: AtomicUsize = AtomicUsize::new(0);
    let script = |call: &ScriptedCall| match call.method.as_str() {
        "CreateVM_Task" if call.body.contains("<host type=\"HostSystem\">host-2</host>") => {
            CREATES.fetch_add(1, Ordering::SeqCst);
            Some(ScriptedReply::Xml("<returnval type=\"Task\">task-5</returnval>".into()))
        }
        "CreateVM_Task" => {
            Some(ScriptedReply::Fault("InvalidArgument", "<invalidProperty>host</invalidProperty>".into()))
        }
        "RetrievePropertiesEx" if call.body.contains(">rp-1<") => {
            let owner = "</val></propSet><propSet><name>owner</name><val type=\"ClusterComputeResource\">c-1";
            Some(ScriptedReply::Xml(object("ResourcePool", "rp-1", &[("x", owner)], &[])))
        }
        "RetrievePropertiesEx" if call.body.contains(">c-1<") => {
            let hosts: String = (1..=2)
                .map(|n| {
                    format!("<ManagedObjectReference type=\"HostSystem\">host-{n}</ManagedObjectReference>")
                })
                .collect();
            Some(ScriptedReply::Xml(object("ClusterComputeResource", "c-1", &[("host", &hosts)], &[])))
        }
        "RetrievePropertiesEx" => {
            let mounts = |id: &str| {
                format!("<ManagedObjectReference type=\"Datastore\">{id}</ManagedObjectReference>")
            };
            let host = |id: &str, store: &str| {
                let properties = [("runtime.connectionState", "connected"), ("datastore", &mounts(store))]
                    .map(|(k, v)| (k, v.to_owned()));
                let properties: Vec<_> = properties.iter().map(|(k, v)| (*k, v.as_str())).collect();
                object("HostSystem", id, &properties, &[])
            };
            let both = host("host-1", "other") + &host("host-2", "ds-1");
            Some(ScriptedReply::Xml(both.replace("</returnval><returnval>", "")))
        }
        _ => None,
    };
    run(script, |server| async move {
        let client = client(&server, |_| {}).await;
        let store = Store { object: Object::new("Datastore", "ds-1"), name: "ds-1".into() };
        for names_host in [false, true] {
            let mut spec = vm_spec("w-0", 1);
            spec.names_host = names_host;
            assert_eq!(client.create(&site(), &store, &spec).await?, TaskId("task-5".into()));
        }
        assert_eq!(CREATES.load(Ordering::SeqCst), 2);
        client.close().await;
        Ok(())
    });
}

#[test]
fn calls_without_an_answer_end_and_release_their_places() {
    run(
        |call| (call.method == "FindAllByUuid").then_some(ScriptedReply::Silence),
        |server| async move {
            let client = client(&server, |options| {
                (options.call, options.calls_max) = (Duration::from_millis(500), 2);
            })
            .await;
            let wanted = Wanted { instance_uuid: "i".into(), ..wanted() };
            let (site, began) = (site(), std::time::Instant::now());
            let found = futures_util::future::join_all((0..5).map(|_| client.find(&site, &wanted))).await;
            assert!(found.iter().all(Result::is_err), "{found:?}");
            assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
            client.close().await;
            Ok(())
        },
    );
}
