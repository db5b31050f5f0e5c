//! A tap joined to an interface in another network namespace. A veth pair connects the namespaces, and frames are redirected
//! between each end of the pair and its neighbour (tc-mirred(8), as Kata Containers does between two interfaces of one
//! namespace). The filter `u32` matches every frame; not every kernel has `matchall`.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

use coracle_types::InstanceId;

use super::conf::INTERFACE;
use super::error::CniError;
use super::netns;
use crate::link::{Links, missing_link};

/// Names of the veth pair: the end on the node, and the end in the namespace.
fn pair(tap: &str) -> (String, String) {
    let digits = tap.trim_start_matches("ct");
    (format!("cv{digits}"), format!("cp{digits}"))
}

/// Opens a netlink connection in the namespace at `path`.
fn open_links(path: &Path) -> Result<Links, CniError> {
    let runtime = tokio::runtime::Handle::current();
    let inside = netns::run_in_netns(path, || {
        let _runtime = runtime.enter();
        Links::open().map_err(std::io::Error::other)
    });
    inside.map_err(|source| CniError::Node { operation: format!("enter {}", path.display()), source })
}

/// MTU of the interface in the namespace at `path`, bytes.
pub(super) async fn mtu(path: &Path) -> Result<u32, CniError> {
    Ok(open_links(path)?.mtu(INTERFACE).await?)
}

pub(super) async fn join(path: &Path, instance: &InstanceId) -> Result<(), CniError> {
    let node = |source| CniError::Node { operation: format!("enter {}", path.display()), source };
    let tap = instance.tap_name();
    let (near, far) = pair(&tap);
    let outside = Links::open()?;
    let inside = open_links(path)?;
    let index_of =
        async |links: &Links, name: &str| links.index(name).await?.ok_or_else(|| missing_link(name));
    let eth = index_of(&inside, INTERFACE).await?;
    let mtu = inside.mtu(INTERFACE).await?;
    // A pair of an earlier run is replaced, because its redirections are unknown.
    outside.delete(&near).await?;
    outside.make_pair(&near, &far).await?;
    let namespace = File::open(path).map_err(node)?;
    let moved = index_of(&outside, &far).await?;
    outside.move_to(&far, moved, namespace.as_raw_fd()).await?;
    let (tap_index, near_index) = (index_of(&outside, &tap).await?, index_of(&outside, &near).await?);
    let far_index = index_of(&inside, &far).await?;
    for (links, name, index) in
        [(&outside, &near, near_index), (&outside, &tap, tap_index), (&inside, &far, far_index)]
    {
        links.set_mtu(name, index, mtu).await?;
    }
    inside.redirect(&far, far_index, eth).await?;
    inside.redirect(INTERFACE, eth, far_index).await?;
    inside.up(&far, far_index, None).await?;
    inside.up(INTERFACE, eth, None).await?;
    outside.redirect(&near, near_index, tap_index).await?;
    outside.redirect(&tap, tap_index, near_index).await?;
    outside.up(&near, near_index, None).await?;
    Ok(outside.up(&tap, tap_index, None).await?)
}

pub(super) async fn disconnect(tap: &str) -> Result<(), CniError> {
    let links = Links::open()?;
    links.down(tap).await?;
    Ok(links.delete(&pair(tap).0).await?)
}
