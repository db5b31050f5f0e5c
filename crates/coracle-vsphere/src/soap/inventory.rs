//! Resolution of names to inventory objects.

use super::{
    session::{Properties, Session},
    xml::{Node, reference, text},
};
use crate::{Network, Object, Site, SiteSpec, Store, VmDatastores, VsphereError};

/// Resolves every name of `spec`.
pub(super) async fn resolve(session: &Session, spec: &SiteSpec) -> Result<Site, VsphereError> {
    let dc_path = spec.datacenter.trim_matches('/').to_owned();
    let missing = |field, kind, name: &str| VsphereError::NoSuchName { field, kind, name: name.to_owned() };
    let no_datacenter = || missing("vsphere.datacenter", "datacenter", &spec.datacenter);
    let datacenter =
        by_path(session, &dc_path).await?.filter(|o| o.kind == "Datacenter").ok_or_else(no_datacenter)?;
    let of_dc = session.properties(&datacenter, &["vmFolder", "datastore", "network"]).await?;
    let of_dc = of_dc.ok_or_else(no_datacenter)?;
    let pool = pool(session, &dc_path, &spec.resource_pool).await?;
    let pool = pool.ok_or_else(|| {
        missing("vsphere.resourcePool", "resource pool below the host folder", &spec.resource_pool)
    })?;
    let stores = read_names(session, of_dc.objects("datastore")).await?;
    let iso = store(session, &dc_path, &stores, &spec.iso_datastore).await?;
    let storage = storage(session, &dc_path, &datacenter, &stores, &spec.datastore_cluster).await?;
    let network = network(session, &dc_path, of_dc.objects("network"), &spec.network).await?;
    // The folder is the last step, because only this step may create an object.
    let vm_folder = of_dc.object("vmFolder").ok_or_else(no_datacenter)?;
    let (folder, folder_path) = folder(session, &dc_path, vm_folder, &spec.folder).await?;
    Ok(Site { spec: spec.clone(), datacenter, folder, folder_path, pool, storage, iso, network })
}

/// The object at an inventory path, without a leading slash.
pub(super) async fn by_path(session: &Session, path: &str) -> Result<Option<Object>, VsphereError> {
    let index = &session.content.search_index;
    let answer = session.call("FindByInventoryPath", index, &text("inventoryPath", path)).await?;
    Ok(answer.get("returnval").and_then(Node::object))
}

/// Returns an inventory path without its leading slash if it starts with a slash and the datacenter, as `govc` prints it. Pure.
fn absolute(dc: &str, path: &str) -> Option<String> {
    let path = path.strip_prefix('/')?.trim_end_matches('/');
    path.strip_prefix(dc)?.starts_with('/').then(|| path.to_owned())
}

/// Object of one of the types at an absolute path, and its name.
async fn find_at_path(
    session: &Session,
    dc: &str,
    path: &str,
    kinds: &[&str],
) -> Result<Option<Store>, VsphereError> {
    let Some(full) = absolute(dc, path) else { return Ok(None) };
    let Some(object) = by_path(session, &full).await?.filter(|o| kinds.contains(&o.kind.as_str())) else {
        return Ok(None);
    };
    let named = session.properties(&object, &["name"]).await?;
    Ok(named.map(|p| Store { name: p.text("name").to_owned(), object }))
}

/// A datastore by its name or its path.
async fn store(
    session: &Session,
    dc: &str,
    stores: &[(Object, String)],
    wanted: &str,
) -> Result<Store, VsphereError> {
    match find_at_path(session, dc, wanted, &["Datastore"]).await? {
        Some(found) => Ok(found),
        None => select_by_name(stores, "vsphere.isoDatastore", "datastore", wanted),
    }
}

/// Resource pool at a path, or the root resource pool of the cluster or host at the path.
async fn pool(session: &Session, dc: &str, path: &str) -> Result<Option<Object>, VsphereError> {
    let full = absolute(dc, path).unwrap_or_else(|| format!("{dc}/host/{}", path.trim_matches('/')));
    let Some(found) = by_path(session, &full).await? else {
        return Ok(None);
    };
    let property = match found.kind.as_str() {
        "ResourcePool" | "VirtualApp" => return Ok(Some(found)),
        "HostSystem" => "parent",
        "ClusterComputeResource" | "ComputeResource" => "resourcePool",
        _ => return Ok(None),
    };
    let next = session.properties(&found, &[property]).await?.and_then(|p| p.object(property));
    match next {
        Some(compute) if property == "parent" => {
            Ok(session.properties(&compute, &["resourcePool"]).await?.and_then(|p| p.object("resourcePool")))
        }
        other => Ok(other),
    }
}

async fn read_names(session: &Session, objects: Vec<Object>) -> Result<Vec<(Object, String)>, VsphereError> {
    let found = session.retrieve(&objects, &["name"]).await?;
    Ok(found.into_iter().map(|(object, p)| (object, p.text("name").to_owned())).collect())
}

/// Compares a name of vCenter, which escapes `/`, `\` and `%`, with a name in either spelling.
fn is_named(name: &str, wanted: &str) -> bool {
    name == wanted || name.replace("%2f", "/").replace("%5c", "\\").replace("%25", "%") == wanted
}

fn select_by_name(
    all: &[(Object, String)],
    field: &'static str,
    kind: &'static str,
    wanted: &str,
) -> Result<Store, VsphereError> {
    let fits: Vec<_> = all.iter().filter(|(_, name)| is_named(name, wanted)).collect();
    match fits.as_slice() {
        [] => Err(VsphereError::NoSuchName { field, kind, name: wanted.to_owned() }),
        [(object, name)] => Ok(Store { object: object.clone(), name: name.clone() }),
        several => Err(VsphereError::Ambiguous {
            field,
            name: wanted.to_owned(),
            candidates: several.iter().map(|(o, _)| o.id.clone()).collect(),
        }),
    }
}

/// Finds a datastore cluster, or else a datastore of the name.
async fn storage(
    session: &Session,
    dc_path: &str,
    dc: &Object,
    stores: &[(Object, String)],
    wanted: &str,
) -> Result<VmDatastores, VsphereError> {
    let field = "vsphere.datastoreCluster";
    let path = absolute(dc_path, wanted).unwrap_or_else(|| format!("{dc_path}/datastore/{wanted}"));
    if let Some(found) = by_path(session, &path).await? {
        let name = path.rsplit('/').next().unwrap_or(wanted).to_owned();
        let store = Store { object: found.clone(), name };
        match found.kind.as_str() {
            "StoragePod" => return Ok(VmDatastores::Pod(store)),
            "Datastore" => return Ok(VmDatastores::Single(store)),
            _ => {}
        }
    }
    // The datastore cluster may be in a folder.
    let pods = in_view(session, dc, "StoragePod").await?;
    if pods.iter().any(|(_, name)| is_named(name, wanted)) {
        return select_by_name(&pods, field, "datastore cluster", wanted).map(VmDatastores::Pod);
    }
    select_by_name(stores, field, "datastore cluster or datastore", wanted).map(VmDatastores::Single)
}

/// Objects of a type below `root`, with their names.
async fn in_view(
    session: &Session,
    root: &Object,
    kind: &str,
) -> Result<Vec<(Object, String)>, VsphereError> {
    let arguments = reference("container", root) + &text("type", kind) + &text("recursive", true);
    let view = session.call("CreateContainerView", &session.content.view_manager, &arguments).await?;
    let Some(view) = view.get("returnval").and_then(Node::object) else { return Ok(Vec::new()) };
    let listed = session.properties(&view, &["view"]).await;
    let _destroyed = session.call("DestroyView", &view, "").await;
    read_names(session, listed?.map(|p| p.objects("view")).unwrap_or_default()).await
}

async fn network(
    session: &Session,
    dc: &str,
    all: Vec<Object>,
    wanted: &str,
) -> Result<Network, VsphereError> {
    let kinds = ["Network", "DistributedVirtualPortgroup", "OpaqueNetwork"];
    let Store { object, name } = match find_at_path(session, dc, wanted, &kinds).await? {
        Some(found) => found,
        None => select_by_name(&read_names(session, all).await?, "vsphere.network", "network", wanted)?,
    };
    let broken = |what: &str| VsphereError::Protocol {
        operation: format!("read network {wanted}"),
        what: what.to_owned(),
    };
    let of = async |object: &Object, path: &'static str| {
        let found: Option<Properties> = session.properties(object, &[path]).await?;
        Ok::<_, VsphereError>(found.unwrap_or_default())
    };
    match object.kind.as_str() {
        "DistributedVirtualPortgroup" => {
            let path = "config.distributedVirtualSwitch";
            let found = session.properties(&object, &["key", path]).await?.unwrap_or_default();
            let switch = found.object(path).ok_or_else(|| broken("the port group has no switch"))?;
            let switch_uuid = of(&switch, "uuid").await?.text("uuid").to_owned();
            Ok(Network::Distributed { switch_uuid, portgroup: found.text("key").to_owned() })
        }
        "OpaqueNetwork" => {
            let found = of(&object, "summary").await?;
            let summary = found.get("summary").ok_or_else(|| broken("it has no summary"))?;
            let field = |name: &str| summary.text_of(name).to_owned();
            Ok(Network::Opaque { id: field("opaqueNetworkId"), kind: field("opaqueNetworkType") })
        }
        _ => Ok(Network::Standard { object, name }),
    }
}

/// Finds the folder, and creates the missing levels of its path.
async fn folder(
    session: &Session,
    dc_path: &str,
    root: Object,
    wanted: &str,
) -> Result<(Object, String), VsphereError> {
    let base = format!("{dc_path}/vm");
    let relative = wanted.trim_matches('/');
    let relative = relative.strip_prefix(&format!("{base}/")).unwrap_or(relative);
    let full = if relative.is_empty() { base.clone() } else { format!("{base}/{relative}") };
    let is_folder = |o: &Object| o.kind == "Folder";
    if let Some(found) = by_path(session, &full).await?.filter(is_folder) {
        return Ok((found, full));
    }
    let (mut at, mut path) = (root, base);
    for level in relative.split('/').filter(|l| !l.is_empty()) {
        path = format!("{path}/{level}");
        if let Some(found) = by_path(session, &path).await?.filter(is_folder) {
            at = found;
            continue;
        }
        let made = session.call("CreateFolder", &at, &text("name", level)).await;
        let found = match made {
            Ok(answer) => answer.get("returnval").and_then(Node::object),
            // Another pool or another operator created the folder first.
            Err(error) if error.fault() == Some("DuplicateName") => {
                by_path(session, &path).await?.filter(is_folder)
            }
            Err(error) => return Err(error),
        };
        let name = || path.clone();
        at = found.ok_or_else(|| VsphereError::NoSuchName {
            field: "vsphere.folder",
            kind: "VM folder",
            name: name(),
        })?;
    }
    Ok((at, path))
}
