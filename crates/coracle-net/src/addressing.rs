//! Guest subnet of a node, the address leases in it, and the subnet that replaces it.

use std::io;
use std::path::{Path, PathBuf};

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

use crate::subnet::choose;
use crate::{Ipam, NetError, Sources, Subnet, Taken};

/// Content of `<state>/network.json`: what a restart must remember.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Chosen {
    schema: u32,
    subnet: Subnet,
    /// Subnet that replaces `subnet` as soon as no VM has an address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    next: Option<Subnet>,
}

#[derive(Debug)]
struct Now {
    chosen: Chosen,
    ipam: Ipam,
}

/// Subnet and address leases of a node, and the file that stores the subnet.
#[derive(Debug)]
pub(crate) struct Addressing {
    path: PathBuf,
    is_fixed: bool,
    now: Mutex<Now>,
}

impl Addressing {
    /// Reads the subnet from the file, or chooses one from `sources`. Writes nothing. A node whose file has another subnet than
    /// the chosen one opens with the subnet of the file, because its VMs have addresses of it.
    ///
    /// # Errors
    /// [`NetError::State`], [`NetError::NoFreeSubnet`].
    pub(crate) async fn open(
        path: PathBuf,
        sources: Sources,
        by_host: Vec<Subnet>,
    ) -> Result<Self, NetError> {
        let file = read(&path).await?;
        let sources = Sources { kept: file.map(|file| file.next.unwrap_or(file.subnet)), ..sources };
        let pool = sources.range.unwrap_or(Subnet::POOL);
        let taken = Taken { by_nodes: vec![], by_host };
        let wanted = choose(&sources, &taken).ok_or(NetError::NoFreeSubnet { pool })?;
        let subnet = file.map_or(wanted, |file| file.subnet);
        let chosen = Chosen { schema: 1, subnet, next: Some(wanted).filter(|next| *next != subnet) };
        let now = Mutex::new(Now { chosen, ipam: Ipam::new(subnet) });
        Ok(Self { path, is_fixed: sources.flag.is_some(), now })
    }

    /// Subnet that the guests have now.
    pub(crate) fn subnet(&self) -> Subnet {
        self.now.lock().chosen.subnet
    }

    /// Address leases. The subnet is kept while any VM has a lease.
    pub(crate) fn ipam(&self) -> parking_lot::MappedMutexGuard<'_, Ipam> {
        MutexGuard::map(self.now.lock(), |now| &mut now.ipam)
    }

    /// Whether an administrator set the subnet.
    pub(crate) fn is_fixed(&self) -> bool {
        self.is_fixed
    }

    /// Records `subnet` as the next one, to be used as soon as no VM has an address. Returns `false` if the guests already have
    /// it.
    pub(crate) fn wait_for(&self, subnet: Subnet) -> bool {
        let chosen = &mut self.now.lock().chosen;
        chosen.next = Some(subnet).filter(|next| *next != chosen.subnet);
        chosen.next.is_some()
    }

    /// Moves to the recorded next subnet, if no VM has an address, and returns it. Later leases are addresses of the new
    /// subnet.
    pub(crate) fn advance(&self) -> Option<Subnet> {
        let mut now = self.now.lock();
        let next = now.chosen.next.filter(|_| now.ipam.is_empty())?;
        now.chosen = Chosen { subnet: next, next: None, ..now.chosen };
        now.ipam = Ipam::new(next);
        Some(next)
    }

    /// Writes the file, if its content differs.
    ///
    /// # Errors
    /// [`NetError::State`].
    pub(crate) async fn save(&self) -> Result<(), NetError> {
        let state = |source| NetError::State { path: self.path.clone(), source };
        let chosen = self.now.lock().chosen;
        if read(&self.path).await? == Some(chosen) {
            return Ok(());
        }
        let path = self.path.clone();
        let write = move || coracle_files::write_atomic(&path, &serde_json::to_vec(&chosen)?);
        coracle_files::blocking(write).await.map_err(state)
    }
}

async fn read(path: &Path) -> Result<Option<Chosen>, NetError> {
    let state = |source| NetError::State { path: path.to_owned(), source };
    match tokio::fs::read(path).await {
        Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|e| state(e.into())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(state(e)),
    }
}

/// Subnet of the node with this state directory, or the one that it gets when its VMs are gone; `None` before its first start.
///
/// # Errors
/// [`NetError::State`].
pub async fn kept_subnet(state_dir: &Path) -> Result<Option<Subnet>, NetError> {
    Ok(read(&file(state_dir)).await?.map(|chosen| chosen.next.unwrap_or(chosen.subnet)))
}

/// Path of the file in a state directory.
pub(crate) fn file(state_dir: &Path) -> PathBuf {
    state_dir.join("network.json")
}

#[cfg(test)]
mod tests {
    use coracle_types::VmId;

    use super::*;

    fn subnet(text: &str) -> Subnet {
        text.parse().unwrap()
    }

    async fn open(dir: &Path, flag: Option<Subnet>) -> Addressing {
        Addressing::open(file(dir), Sources { flag, ..Sources::default() }, vec![]).await.unwrap()
    }

    #[tokio::test]
    async fn subnet_change_waits_for_the_last_lease() {
        let dir = tempfile::tempdir().unwrap();
        let vm = VmId::of_name(&"a".parse().unwrap());
        let (first, second) = (subnet("10.100.0.0/24"), subnet("10.7.0.0/24"));
        let node = open(dir.path(), None).await;
        let lease = node.ipam().lease(&vm, None).unwrap();
        assert!(node.wait_for(second));
        assert_eq!((node.advance(), node.subnet()), (None, first), "a VM has an address");
        node.save().await.unwrap();
        let node = open(dir.path(), None).await;
        assert_eq!(node.subnet(), first, "after a restart its record has it");
        node.ipam().lease(&vm, Some(lease.address)).unwrap();
        assert_eq!(node.advance(), None);
        node.ipam().release(&vm);
        assert_eq!((node.advance(), node.subnet()), (Some(second), second));
        node.save().await.unwrap();
        assert_eq!(open(dir.path(), None).await.subnet(), second);
        assert_eq!(kept_subnet(dir.path()).await.unwrap(), Some(second));
    }

    #[tokio::test]
    async fn new_subnet_flag_waits_until_no_vm_has_an_address() {
        let dir = tempfile::tempdir().unwrap();
        open(dir.path(), None).await.save().await.unwrap();
        let wanted = subnet("10.9.0.0/24");
        let node = open(dir.path(), Some(wanted)).await;
        assert!(node.is_fixed());
        assert_eq!((node.subnet(), node.advance()), (Subnet::POOL.first_free_24(&[]).unwrap(), Some(wanted)));
        assert!(!node.wait_for(wanted));
    }
}
