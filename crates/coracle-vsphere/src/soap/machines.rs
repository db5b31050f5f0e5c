//! Machines: found, placed, created; and read from properties.

use std::{collections::HashSet, time::Duration};

use futures_util::future::try_join_all;
use tokio::time::Instant;
use tracing::debug;

use super::{
    SoapVsphere, inventory, lock,
    session::{Properties, Session},
    spec,
    xml::{Node, reference, text},
};
use crate::{
    Cdrom, Object, Question, Site, Storage, Store, TaskId, Vm, VmSpec, VsphereError, Wanted, bios_uuid, mac,
};

/// What is read of a machine.
pub(super) const PATHS: [&str; 8] = [
    "name",
    "parent",
    "config.uuid",
    "config.instanceUuid",
    "config.annotation",
    "config.hardware.device",
    "runtime.powerState",
    "runtime.question",
];
/// Space promised to a disk counts until the datastore itself shows it.
const PROMISE: Duration = Duration::from_secs(120);

/// Every machine that fits, read now: three searches at once, and one read when something was found.
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
        // One of them went away in between: look at each.
        Err(error) if error.fault() == Some("ManagedObjectNotFound") => {
            let mut found = Vec::new();
            for object in objects {
                found.extend(session.properties(object, &PATHS).await?.map(|p| (object.clone(), p)));
            }
            found
        }
        Err(error) => return Err(error),
    };
    Ok(found.into_iter().map(|(object, properties)| whole(object, &properties)).collect())
}

fn whole(object: Object, properties: &Properties) -> Vm {
    let mut vm = unknown(object);
    for path in PATHS {
        apply(&mut vm, path, properties.get(path));
    }
    vm
}

/// A machine of which nothing is known but that it is.
pub(super) fn unknown(object: Object) -> Vm {
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
    }
}

/// Takes over one property; `None`: it is unset.
pub(super) fn apply(vm: &mut Vm, path: &str, value: Option<&Node>) {
    let string = || value.map_or_else(String::new, |v| v.text.clone());
    let uuid = || bios_uuid(&string()).unwrap_or_default();
    match path {
        "name" => vm.name = string(),
        "parent" => vm.folder = value.and_then(Node::object),
        "config.uuid" => vm.uuid = uuid(),
        "config.instanceUuid" => vm.instance_uuid = uuid(),
        "config.annotation" => vm.annotation = string(),
        "runtime.powerState" => vm.powered_on = string() == "poweredOn",
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
        message_ids: node.all("message").map(|m| m.text_of("id").to_owned()).collect(),
        choices: choices
            .iter()
            .map(|c| (c.text_of("key").to_owned(), c.text_of("label").to_owned()))
            .collect(),
    }
}

/// Calls a method that answers with a task.
pub(super) async fn start(
    session: &Session,
    method: &'static str,
    this: &Object,
    arguments: &str,
) -> Result<TaskId, VsphereError> {
    let answer = session.call(method, this, arguments).await?;
    let task = answer.get("returnval").and_then(Node::object);
    task.map(|t| TaskId(t.id)).ok_or_else(|| VsphereError::Protocol {
        operation: format!("{method} of {}", this.id),
        what: "no task in the answer".into(),
    })
}

/// Starts to create a machine. Where vCenter does not choose a host itself it is given one.
pub(super) async fn create(
    session: &Session,
    site: &Site,
    store: &Store,
    vm: &VmSpec,
) -> Result<TaskId, VsphereError> {
    let arguments = spec::config("config", vm, site, Some(store))? + &reference("pool", &site.pool);
    match start(session, "CreateVM_Task", &site.folder, &arguments).await {
        Err(VsphereError::Fault { operation, fault })
            if fault.kind == "InvalidArgument"
                && fault.fields.get("invalidProperty").is_none_or(|p| p.contains("host")) =>
        {
            let Some(host) = host(session, site).await? else {
                return Err(VsphereError::Fault { operation, fault });
            };
            let arguments = arguments + &reference("host", &host);
            start(session, "CreateVM_Task", &site.folder, &arguments).await
        }
        other => other,
    }
}

/// A connected host of the pool's cluster.
async fn host(session: &Session, site: &Site) -> Result<Option<Object>, VsphereError> {
    let owner = session.properties(&site.pool, &["owner"]).await?.and_then(|p| p.object("owner"));
    let Some(owner) = owner else { return Ok(None) };
    let hosts = session.properties(&owner, &["host"]).await?.map(|p| p.objects("host")).unwrap_or_default();
    let states = session.retrieve(&hosts, &["runtime.connectionState", "runtime.inMaintenanceMode"]).await?;
    let usable = |p: &Properties| {
        p.text("runtime.connectionState") == "connected" && p.text("runtime.inMaintenanceMode") != "true"
    };
    Ok(states.into_iter().find(|(_, p)| usable(p)).map(|(host, _)| host))
}

impl SoapVsphere {
    /// vCenter's recommendation; without one the member with most room.
    pub(super) async fn choose_store(&self, site: &Site, vm: &VmSpec) -> Result<Store, VsphereError> {
        let pod = match &site.storage {
            Storage::Single(store) => return Ok(store.clone()),
            Storage::Pod(pod) => pod,
        };
        match self.recommended(site, vm, pod).await {
            Ok(Some(store)) => return Ok(store),
            Ok(None) => debug!(pod = pod.name, "no recommendation; the member with most room is taken"),
            // Storage DRS is off.
            Err(error) if error.fault() == Some("InvalidArgument") => {
                debug!(
                    pod = pod.name,
                    "no recommendations from this pod; the member with most room is taken"
                );
            }
            Err(error) => return Err(error),
        }
        self.roomiest(vm, pod).await
    }

    async fn recommended(
        &self,
        site: &Site,
        vm: &VmSpec,
        pod: &Store,
    ) -> Result<Option<Store>, VsphereError> {
        let arguments = spec::placement(vm, site, &pod.object)?;
        let manager = &self.session.content.storage_manager;
        let answer = self.session.call("RecommendDatastores", manager, &arguments).await?;
        let actions = answer.get("returnval").into_iter().flat_map(|r| r.all("recommendations"));
        let mut destinations = actions
            .flat_map(|r| r.all("action"))
            .filter(|a| a.xsi == "StoragePlacementAction")
            .filter_map(|a| a.get("destination")?.object());
        match destinations.next() {
            Some(object) => {
                let (name, _) = self.store(&object).await?;
                Ok(Some(Store { object, name }))
            }
            None => Ok(None),
        }
    }

    async fn roomiest(&self, vm: &VmSpec, pod: &Store) -> Result<Store, VsphereError> {
        let members = self.session.properties(&pod.object, &["childEntity"]).await?;
        let members = members.map(|p| p.objects("childEntity")).unwrap_or_default();
        let found = self.session.retrieve(&members, &["name", "summary"]).await?;
        let needed = u64::try_from(vm.disk_gib).unwrap_or(0) << 30;
        let mut promised = lock(&self.promised);
        promised.retain(|(at, ..)| at.elapsed() < PROMISE);
        let room = |object: &Object, p: &Properties| {
            let summary = p.get("summary")?;
            let usable = summary.text_of("accessible") == "true"
                && matches!(summary.text_of("maintenanceMode"), "" | "normal");
            let free: u64 = summary.text_of("freeSpace").parse().ok()?;
            let taken: u64 = promised.iter().filter(|(_, at, _)| at == object).map(|(.., bytes)| bytes).sum();
            // A thin disk starts small: what counts is that the promised sizes do not all go to one place.
            (usable && free > 0).then(|| i128::from(free) - i128::from(taken))
        };
        let best = found.iter().filter_map(|(o, p)| Some((room(o, p)?, o, p))).max_by_key(|(room, ..)| *room);
        let thick = |room: i128| vm.eager_disk && room < i128::from(needed);
        let Some((_, object, properties)) = best.filter(|(room, ..)| !thick(*room)) else {
            return Err(VsphereError::NoSpace { pod: pod.name.clone(), needed_mib: needed >> 20 });
        };
        let store = Store { object: object.clone(), name: properties.text("name").to_owned() };
        promised.push((Instant::now(), store.object.clone(), needed));
        Ok(store)
    }

    /// Name and browser of a datastore, asked once.
    pub(super) async fn store(&self, object: &Object) -> Result<(String, Object), VsphereError> {
        if let Some(known) = lock(&self.stores).get(&object.id) {
            return Ok(known.clone());
        }
        let found = self.session.properties(object, &["name", "browser"]).await?.unwrap_or_default();
        let broken = || VsphereError::Protocol {
            operation: format!("read datastore {}", object.id),
            what: "it has no name or no browser".into(),
        };
        let browser = found.object("browser").ok_or_else(broken)?;
        let known = (found.text("name").to_owned(), browser);
        lock(&self.stores).insert(object.id.clone(), known.clone());
        Ok(known)
    }
}
