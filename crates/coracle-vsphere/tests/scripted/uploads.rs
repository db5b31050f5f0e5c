//! Uploads directly to a host, and through vCenter where that is not possible.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use coracle_vsphere::Vsphere as _;
use coracle_vsphere_testing::{ScriptedCall, ScriptedReply, ScriptedVcenter};
use futures_util::{StreamExt as _, stream};

use super::{client, object, run, site};

const PUT_AT_HOST: &str = "PUT /folder/a/b%20c.iso?dsName=ds-1";
const PUT_AT_VCENTER: &str = "PUT /folder/a/b%20c.iso?dsName=ds-1&dcPath=DC0";

/// Answers of a vCenter with two hosts that mount the datastore: one for reading only, and `esx-2`. `host` is the host of the
/// ticket; `None`: the user may not acquire tickets.
fn vcenter(call: &ScriptedCall, host: Option<&str>) -> Option<ScriptedReply> {
    let mount = |id: &str, mode: &str| {
        format!(
            "<DatastoreHostMount><key type=\"HostSystem\">{id}</key><mountInfo><accessMode>{mode}</accessMode>\
             <accessible>true</accessible></mountInfo></DatastoreHostMount>"
        )
    };
    match call.method.as_str() {
        "RetrievePropertiesEx" if call.body.contains(">ds-1<") => {
            let mounts = mount("host-1", "readOnly") + &mount("host-2", "readWrite");
            Some(ScriptedReply::Xml(object("Datastore", "ds-1", &[("host", &mounts)], &[])))
        }
        "RetrievePropertiesEx" if call.body.contains(">host-2<") => {
            let state = [("name", "esx-2"), ("runtime.connectionState", "connected")];
            Some(ScriptedReply::Xml(object("HostSystem", "host-2", &state, &[])))
        }
        "AcquireGenericServiceTicket" => Some(match host {
            Some(host)
                if call.body.contains("<method>httpPut</method><url>http://esx-2/folder/a/b%20c.iso") =>
            {
                ScriptedReply::Xml(format!(
                    "<returnval><id>ticket-1</id><hostName>{host}</hostName></returnval>"
                ))
            }
            _ => ScriptedReply::Fault("NoPermission", String::new()),
        }),
        method if method.starts_with("PUT ") => Some(ScriptedReply::Http(201, String::new())),
        _ => None,
    }
}

/// Uploads `whole` through a client of the scripted vCenter.
async fn upload(vcenter: &ScriptedVcenter) -> anyhow::Result<()> {
    let client = client(vcenter, |_| {}).await;
    let chunks = ["who", "le"].map(|chunk| Ok(Bytes::from(chunk)));
    client.upload(&site(), "a/b c.iso", 5, stream::iter(chunks).boxed()).await?;
    client.close().await;
    Ok(())
}

#[test]
fn upload_uses_host_with_ticket_and_bypasses_vcenter() {
    let seen: Arc<Mutex<Vec<ScriptedCall>>> = Arc::default();
    let puts = seen.clone();
    let at_host = move |call: &ScriptedCall| {
        puts.lock().unwrap().push(call.clone());
        Some(ScriptedReply::Http(201, String::new()))
    };
    run(at_host, |host| async move {
        let address = host.address().to_string();
        let server = ScriptedVcenter::start(move |call| vcenter(call, Some(&address))).await?;
        upload(&server).await?;
        assert_eq!((server.count(PUT_AT_VCENTER), host.count(PUT_AT_HOST)), (0, 1));
        let put = seen.lock().unwrap()[0].clone();
        assert_eq!(put.body, "whole");
        let head = put.head.to_ascii_lowercase();
        assert!(head.contains("cookie: vmware_cgi_ticket=ticket-1"), "{head}");
        assert!(head.contains("content-length: 5"), "{head}");
        assert!(!head.contains("vmware_soap_session"), "the session is not for hosts: {head}");
        Ok(())
    });
}

#[test]
fn upload_falls_back_to_vcenter_if_no_host_is_usable() {
    // The user may not acquire tickets; the host cannot be reached.
    for host in [None, Some("127.0.0.1:9")] {
        let seen: Arc<Mutex<Vec<String>>> = Arc::default();
        let puts = seen.clone();
        let script = move |call: &ScriptedCall| {
            if call.method == PUT_AT_VCENTER {
                puts.lock().unwrap().push(call.body.clone());
            }
            vcenter(call, host)
        };
        run(script, |server| async move {
            upload(&server).await?;
            assert_eq!(*seen.lock().unwrap(), ["whole"], "{host:?}");
            Ok(())
        });
    }
}
