//! Tests of the order of elements, which no simulator checks.

use super::*;
use crate::{SiteSpec, VmDatastores};

fn site(network: Network) -> Site {
    let store = |id: &str, name: &str| Store { object: Object::new("Datastore", id), name: name.into() };
    Site {
        spec: SiteSpec {
            datacenter: "DC0".into(),
            datastore_cluster: "pod".into(),
            iso_datastore: "isos".into(),
            resource_pool: "c/Resources".into(),
            folder: "demo".into(),
            network: "VM Network".into(),
        },
        datacenter: Object::new("Datacenter", "datacenter-2"),
        folder: Object::new("Folder", "group-v9"),
        folder_path: "/DC0/vm/demo".into(),
        pool: Object::new("ResourcePool", "resgroup-8"),
        storage: VmDatastores::Pod(Store {
            object: Object::new("StoragePod", "group-p1"),
            name: "pod".into(),
        }),
        iso: store("datastore-1", "isos"),
        network,
    }
}

fn vm() -> VmConfigSpec {
    VmConfigSpec {
        name: "worker-<1>".into(),
        uuid: "11111111-2222-5333-8444-555555555555".into(),
        instance_uuid: "66666666-7777-5888-9999-000000000000".into(),
        guest_id: "rhel9_64Guest".into(),
        annotation: "agent-forge.containeroo.ch/vsphere-agent-uid=u&1".into(),
        cpus: 4,
        memory_mib: 16384,
        disk_gib: 100,
        eager_disk: false,
        firmware: "efi".into(),
        controller: "pvscsi".into(),
        adapter: "vmxnet3".into(),
        iso: "[isos] agent-forge/a.iso".into(),
        directory: String::new(),
        names_host: false,
    }
}

/// Formats XML with one element per line, so that a difference can be read.
fn pretty(xml: &str) -> String {
    xml.replace("><", ">\n<")
}

#[test]
fn golden_create_spec() {
    let standard =
        Network::Standard { object: Object::new("Network", "network-7"), name: "VM Network".into() };
    let store = Store { object: Object::new("Datastore", "datastore-5"), name: "LocalDS_1".into() };
    insta::assert_snapshot!(
        "create",
        pretty(&config("config", &vm(), &site(standard), Some(&store)).unwrap())
    );
}

#[test]
fn golden_create_spec_with_other_devices() {
    let distributed =
        Network::Distributed { switch_uuid: "50 0a".into(), portgroup: "dvportgroup-11".into() };
    let mut other = vm();
    (other.controller, other.adapter, other.eager_disk) = ("ide".into(), "e1000e".into(), true);
    (other.firmware, other.directory) = ("bios".into(), "worker-1_2".into());
    let store = Store { object: Object::new("Datastore", "datastore-5"), name: "LocalDS_1".into() };
    insta::assert_snapshot!(
        "create_other",
        pretty(&config("config", &other, &site(distributed), Some(&store)).unwrap())
    );
}

#[test]
fn golden_placement_spec() {
    let opaque = Network::Opaque { id: "ls-1".into(), kind: "nsx.LogicalSwitch".into() };
    let pod = Object::new("StoragePod", "group-p1");
    insta::assert_snapshot!("placement", pretty(&placement(&vm(), &site(opaque), &pod).unwrap()));
}

#[test]
fn golden_changes() {
    let drive =
        Cdrom { key: 3000, controller_key: 200, unit: 0, iso: Some("[isos] a.iso".into()), connected: true };
    let all = [
        Change::Annotation("mine".into()),
        Change::InsertIso { cdrom: drive.clone(), iso: "[isos] b.iso".into() },
        Change::Disconnect(drive.clone()),
        Change::Empty(drive),
    ];
    insta::assert_snapshot!(
        "changes",
        all.iter().map(|c| pretty(&change(c))).collect::<Vec<_>>().join("\n\n")
    );
}

#[test]
fn unknown_adapter_type_names_the_field() {
    let standard =
        Network::Standard { object: Object::new("Network", "network-7"), name: "VM Network".into() };
    let mut wrong = vm();
    wrong.adapter = "tulip".into();
    let error = config("config", &wrong, &site(standard), None).unwrap_err();
    assert!(
        error.to_string().starts_with("vsphere.networkAdapterType: \"tulip\" is not one of e1000"),
        "{error}"
    );
}
