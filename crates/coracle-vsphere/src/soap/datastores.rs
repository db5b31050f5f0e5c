//! Datastores: choice of one for a new VM; names and browsers.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::debug;

use super::{
    session::{Properties, Session},
    spec,
};
use crate::{Object, Site, Store, VmConfigSpec, VmDatastores, VsphereError};

/// Time for which the client itself counts the space of a new disk, until the datastore reports it.
const PROMISE: Duration = Duration::from_secs(120);

/// Datastores of a vCenter.
#[derive(Debug)]
pub(super) struct Datastores {
    session: Arc<Session>,
    /// Names of datastores and their browsers, by id.
    known: Mutex<HashMap<String, (String, Object)>>,
    /// Space of disks that are being created: time, datastore, bytes.
    promised: Mutex<Vec<(Instant, Object, u64)>>,
}

impl Datastores {
    pub(super) fn new(session: Arc<Session>) -> Self {
        Self { session, known: Mutex::default(), promised: Mutex::default() }
    }

    pub(super) fn forget(&self) {
        self.known.lock().clear();
    }

    /// Chooses the datastore of a new VM: the one that vCenter recommends, otherwise the member with most free space.
    pub(super) async fn choose(&self, site: &Site, vm: &VmConfigSpec) -> Result<Store, VsphereError> {
        let pod = match &site.storage {
            VmDatastores::Single(store) => return Ok(store.clone()),
            VmDatastores::Pod(pod) => pod,
        };
        match self.recommended(site, vm, pod).await {
            Ok(Some(store)) => return Ok(store),
            Ok(None) => debug!(pod = pod.name, "no recommendation, using the member with most free space"),
            // Storage DRS is off.
            Err(error) if error.fault() == Some("InvalidArgument") => {
                debug!(
                    pod = pod.name,
                    "no recommendations from this pod, using the member with most free space"
                );
            }
            Err(error) => return Err(error),
        }
        self.choose_roomiest(vm, pod).await
    }

    async fn recommended(
        &self,
        site: &Site,
        vm: &VmConfigSpec,
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
                let (name, _) = self.datastore_info(&object).await?;
                Ok(Some(Store { object, name }))
            }
            None => Ok(None),
        }
    }

    async fn choose_roomiest(&self, vm: &VmConfigSpec, pod: &Store) -> Result<Store, VsphereError> {
        let members = self.session.properties(&pod.object, &["childEntity"]).await?;
        let members = members.map(|p| p.objects("childEntity")).unwrap_or_default();
        let found = self.session.retrieve(&members, &["name", "summary"]).await?;
        let needed = u64::try_from(vm.disk_gib).unwrap_or(0) << 30;
        let mut promised = self.promised.lock();
        promised.retain(|(at, ..)| at.elapsed() < PROMISE);
        let room = |object: &Object, p: &Properties| {
            let summary = p.get("summary")?;
            let usable = summary.text_of("accessible") == "true"
                && matches!(summary.text_of("maintenanceMode"), "" | "normal");
            let free: u64 = summary.text_of("freeSpace").parse().ok()?;
            let taken: u64 = promised.iter().filter(|(_, at, _)| at == object).map(|(.., bytes)| bytes).sum();
            // A thin disk starts small: free space alone would place all new disks on one datastore.
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

    /// Object that searches a datastore's files (`HostDatastoreBrowser`).
    pub(super) async fn browser(&self, object: &Object) -> Result<Object, VsphereError> {
        Ok(self.datastore_info(object).await?.1)
    }

    /// Name and browser of a datastore, cached after the first call.
    async fn datastore_info(&self, object: &Object) -> Result<(String, Object), VsphereError> {
        if let Some(known) = self.known.lock().get(&object.id) {
            return Ok(known.clone());
        }
        let found = self.session.properties(object, &["name", "browser"]).await?.unwrap_or_default();
        let broken = || VsphereError::Protocol {
            operation: format!("read datastore {}", object.id),
            what: "it has no name or no browser".into(),
        };
        let browser = found.object("browser").ok_or_else(broken)?;
        let known = (found.text("name").to_owned(), browser);
        self.known.lock().insert(object.id.clone(), known.clone());
        Ok(known)
    }
}
