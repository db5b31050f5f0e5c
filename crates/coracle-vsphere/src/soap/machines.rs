//! VMs: search, creation, and conversion from properties.

use std::collections::HashSet;

use futures_util::future::try_join_all;

use super::{
    inventory,
    session::{Properties, Session},
    spec,
    xml::{Node, reference, text},
};
use crate::{
    Cdrom, Object, Question, Site, Store, TaskId, Vm, VmConfigSpec, VsphereError, Wanted, bios_uuid, mac,
};

/// Properties of a VM that are read.
pub(super) const PATHS: [&str; 9] = [
    "name",
    "parent",
    "config.uuid",
    "config.instanceUuid",
    "config.annotation",
    "config.hardware.device",
    "runtime.powerState",
    "runtime.connectionState",
    "runtime.question",
];

/// Reads all matching VMs: three concurrent searches, and one read if they found something.
pub(super) async fn find(session: &Session, site: &Site, wanted: &Wanted) -> Result<Vec<Vm>, VsphereError> {
    let by_uuid = |uuid: String, instance: bool| async move {
        let arguments = reference("datacenter", &site.datacenter)
            + &text("uuid", uuid)
            + &text("vmSearch", true)
            + &text("instanceUuid", instance);
        let answer = session.call("FindAllByUuid", &session.content.search_index, &arguments).await?;
        Ok::<Vec<Object>, VsphereError>(answer.all("returnval").filter_map(Node::object).collect())
    };
    let mut searches = Vec::new();
    if !wanted.instance_uuid.is_empty() {
        searches.push(by_uuid(wanted.instance_uuid.clone(), true));
    }
    for uuid in wanted.uuids.iter().filter(|u| !u.is_empty()) {
        searches.push(by_uuid(uuid.clone(), false));
    }
    let by_name = async {
        if wanted.name.is_empty() {
            return Ok(None);
        }
        inventory::by_path(session, &format!("{}/{}", site.folder_path, wanted.name)).await
    };
    let (found, named) = tokio::try_join!(try_join_all(searches), by_name)?;
    let all = found.into_iter().flatten().chain(named).filter(|o| o.kind == "VirtualMachine");
    let objects: Vec<_> = all.collect::<HashSet<_>>().into_iter().collect();
    if objects.is_empty() {
        return Ok(Vec::new());
    }
    read(session, &objects).await
}

async fn read(session: &Session, objects: &[Object]) -> Result<Vec<Vm>, VsphereError> {
    let found = match session.retrieve(objects, &PATHS).await {
        Ok(found) => found,
        // One of the VMs was deleted meanwhile: read each one alone.
        Err(error) if error.fault() == Some("ManagedObjectNotFound") => {
            let mut found = Vec::new();
            for object in objects {
                found.extend(session.properties(object, &PATHS).await?.map(|p| (object.clone(), p)));
            }
            found
        }
        Err(error) => return Err(error),
    };
    Ok(found.into_iter().map(|(object, properties)| vm_from_properties(object, &properties)).collect())
}

fn vm_from_properties(object: Object, properties: &Properties) -> Vm {
    let mut vm = unknown_vm(object);
    for path in PATHS {
        apply(&mut vm, path, properties.get(path));
    }
    settle(&mut vm);
    vm
}

/// VM before any of its properties is known.
pub(super) fn unknown_vm(object: Object) -> Vm {
    Vm {
        object,
        name: String::new(),
        folder: None,
        uuid: String::new(),
        instance_uuid: String::new(),
        annotation: String::new(),
        powered_on: false,
        mac: String::new(),
        cdrom: None,
        question: None,
        unreadable: String::new(),
    }
}

/// Decides whether the configuration of a VM is known. vCenter has none while the VM's files are unreachable, after its host
/// lost it, and while it is being registered.
pub(super) fn settle(vm: &mut Vm) {
    let is_known = matches!(vm.unreadable.as_str(), "" | "connected" | "disconnected");
    if is_known {
        vm.unreadable = if vm.uuid.is_empty() { NO_CONFIG.to_owned() } else { String::new() };
    }
}

/// Value of [`Vm::unreadable`] for a VM without `config`. Other values are those of `VirtualMachineConnectionState`, whose
/// `inaccessible`, `invalid` and `orphaned` say that the configuration cannot be read.
const NO_CONFIG: &str = "without configuration";

/// Applies one property; `None`: the property is unset. A VM keeps the identity that it had before its configuration was lost.
pub(super) fn apply(vm: &mut Vm, path: &str, value: Option<&Node>) {
    let string = || value.map_or_else(String::new, |v| v.text.clone());
    let uuid = || bios_uuid(&string()).unwrap_or_default();
    match path {
        "name" => vm.name = string(),
        "parent" => vm.folder = value.and_then(Node::object),
        "config.uuid" if value.is_none() => vm.unreadable = NO_CONFIG.to_owned(),
        "config.uuid" => vm.uuid = uuid(),
        "config.instanceUuid" | "config.annotation" | "config.hardware.device" if value.is_none() => {}
        "config.instanceUuid" => vm.instance_uuid = uuid(),
        "config.annotation" => vm.annotation = string(),
        "runtime.powerState" => vm.powered_on = string() == "poweredOn",
        "runtime.connectionState" => vm.unreadable = string(),
        "runtime.question" => vm.question = value.map(question),
        "config.hardware.device" => {
            let devices = || value.into_iter().flat_map(|v| v.children.iter());
            vm.mac =
                devices().map(|d| mac(d.text_of("macAddress"))).find(|m| !m.is_empty()).unwrap_or_default();
            vm.cdrom = devices().find(|d| d.xsi == "VirtualCdrom").map(cdrom);
        }
        _ => {}
    }
}

fn cdrom(device: &Node) -> Cdrom {
    let number = |name: &str| device.text_of(name).parse().unwrap_or(0);
    let backing = device.get("backing");
    let iso =
        backing.filter(|b| b.xsi == "VirtualCdromIsoBackingInfo").map(|b| b.text_of("fileName").to_owned());
    Cdrom {
        key: number("key"),
        controller_key: number("controllerKey"),
        unit: number("unitNumber"),
        iso,
        connected: device.get("connectable").is_some_and(|c| c.text_of("connected") == "true"),
    }
}

fn question(node: &Node) -> Question {
    let choices = node.get("choice").map(|c| c.all("choiceInfo").collect::<Vec<_>>()).unwrap_or_default();
    Question {
        id: node.text_of("id").to_owned(),
        text: node.text_of("text").to_owned(),
        message_ids: node.all("message").map(|m| m.text_of("id").to_owned()).collect(),
        choices: choices
            .iter()
            .map(|c| (c.text_of("key").to_owned(), c.text_of("label").to_owned()))
            .collect(),
    }
}

/// Starts to create a VM. Names a host if vCenter refuses to choose one.
pub(super) async fn create(
    session: &Session,
    site: &Site,
    store: &Store,
    vm: &VmConfigSpec,
) -> Result<TaskId, VsphereError> {
    let arguments = spec::config("config", vm, site, Some(store))? + &reference("pool", &site.pool);
    if vm.names_host {
        let host = host(session, site, store).await?.map(|host| reference("host", &host)).unwrap_or_default();
        return session.start_task("CreateVM_Task", &site.folder, &(arguments + &host)).await;
    }
    match session.start_task("CreateVM_Task", &site.folder, &arguments).await {
        Err(VsphereError::Fault { operation, fault }) if fault.asks_for_host() => {
            let Some(host) = host(session, site, store).await? else {
                return Err(VsphereError::Fault { operation, fault });
            };
            let arguments = arguments + &reference("host", &host);
            session.start_task("CreateVM_Task", &site.folder, &arguments).await
        }
        other => other,
    }
}

/// Finds a connected host of the pool's cluster that mounts the datastore.
async fn host(session: &Session, site: &Site, store: &Store) -> Result<Option<Object>, VsphereError> {
    let owner = session.properties(&site.pool, &["owner"]).await?.and_then(|p| p.object("owner"));
    let Some(owner) = owner else { return Ok(None) };
    let hosts = session.properties(&owner, &["host"]).await?.map(|p| p.objects("host")).unwrap_or_default();
    let paths = ["runtime.connectionState", "runtime.inMaintenanceMode", "datastore"];
    let states = session.retrieve(&hosts, &paths).await?;
    let usable = |p: &Properties| {
        p.text("runtime.connectionState") == "connected"
            && p.text("runtime.inMaintenanceMode") != "true"
            && p.objects("datastore").contains(&store.object)
    };
    Ok(states.into_iter().find(|(_, p)| usable(p)).map(|(host, _)| host))
}
