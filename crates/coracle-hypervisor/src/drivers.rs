//! Several drivers as one: each machine's recipe says which is its.

use async_trait::async_trait;
use std::sync::Arc;

use futures_util::future::{join_all, try_join_all};
use tokio::net::UnixStream;

use crate::{Accelerator, Disk, Driver, DriverError, Probe, ProcessId, Snapshots, Templates, VmRecipe};

/// The drivers of a node. The first one is that of machines that name none.
#[derive(Clone, Debug)]
pub struct Drivers {
    first: Arc<dyn Driver>,
    others: Vec<Arc<dyn Driver>>,
}

impl Drivers {
    /// With that default, and these beside it.
    #[must_use]
    pub fn new(first: Arc<dyn Driver>, others: Vec<Arc<dyn Driver>>) -> Self {
        Self { first, others }
    }

    /// All of them, the default first.
    pub fn all(&self) -> impl Iterator<Item = &Arc<dyn Driver>> {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// The driver of that name; empty: the default.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<&Arc<dyn Driver>> {
        self.all().find(|driver| name.is_empty() || driver.name() == name)
    }

    fn of(&self, recipe: &VmRecipe) -> Result<&Arc<dyn Driver>, DriverError> {
        self.named(&recipe.driver).ok_or_else(|| DriverError::Unknown { name: recipe.driver.clone() })
    }

    /// How guest code runs under the driver of that name; TCG where that is not known.
    pub async fn accelerator(&self, name: &str) -> Accelerator {
        match self.named(name) {
            Some(driver) => driver.probe().await.accelerator.unwrap_or(Accelerator::Tcg),
            None => Accelerator::Tcg,
        }
    }
}

impl<D: Driver + 'static> From<Arc<D>> for Drivers {
    fn from(first: Arc<D>) -> Self {
        Self::new(first, Vec::new())
    }
}

#[async_trait]
impl Driver for Drivers {
    fn name(&self) -> &'static str {
        self.first.name()
    }

    async fn probe(&self) -> Probe {
        self.first.probe().await
    }

    async fn start(&self, recipe: &VmRecipe) -> Result<ProcessId, DriverError> {
        self.of(recipe)?.start(recipe).await
    }

    async fn find(&self, recipe: &VmRecipe) -> Result<Option<ProcessId>, DriverError> {
        self.of(recipe)?.find(recipe).await
    }

    /// A process is one driver's; to the others it is gone.
    async fn exited(&self, process: ProcessId) -> Result<(), DriverError> {
        try_join_all(self.all().map(|driver| driver.exited(process))).await.map(drop)
    }

    async fn kill(&self, process: ProcessId) -> Result<(), DriverError> {
        join_all(self.all().map(|driver| driver.kill(process))).await.into_iter().collect()
    }

    async fn guest_channel(&self, recipe: &VmRecipe) -> Result<UnixStream, DriverError> {
        self.of(recipe)?.guest_channel(recipe).await
    }

    async fn console(&self, recipe: &VmRecipe) -> Result<UnixStream, DriverError> {
        self.of(recipe)?.console(recipe).await
    }

    async fn pause(&self, recipe: &VmRecipe) -> Result<(), DriverError> {
        self.of(recipe)?.pause(recipe).await
    }

    async fn resume(&self, recipe: &VmRecipe) -> Result<(), DriverError> {
        self.of(recipe)?.resume(recipe).await
    }

    async fn insert_disk(&self, recipe: &VmRecipe, disk: &Disk) -> Result<(), DriverError> {
        self.of(recipe)?.insert_disk(recipe, disk).await
    }

    async fn eject_disk(&self, recipe: &VmRecipe, slot: usize) -> Result<(), DriverError> {
        self.of(recipe)?.eject_disk(recipe, slot).await
    }

    async fn forget(&self, recipe: &VmRecipe) -> Result<(), DriverError> {
        self.of(recipe)?.forget(recipe).await
    }

    fn has_machine(&self, recipe: &VmRecipe) -> bool {
        self.of(recipe).is_ok_and(|driver| driver.has_machine(recipe))
    }

    fn has_user_network(&self, recipe: &VmRecipe) -> bool {
        self.of(recipe).is_ok_and(|driver| driver.has_user_network(recipe))
    }

    fn snapshots(&self, recipe: &VmRecipe) -> Option<&dyn Snapshots> {
        self.of(recipe).ok()?.snapshots(recipe)
    }

    fn templates(&self, recipe: &VmRecipe) -> Option<&dyn Templates> {
        self.of(recipe).ok()?.templates(recipe)
    }
}

#[cfg(test)]
mod tests {
    use coracle_types::VmId;

    use super::*;
    use crate::fake::{FakeDriver, FakeMachines};

    fn recipe(driver: &str) -> VmRecipe {
        VmRecipe {
            id: VmId::of_name(&"fake".parse().unwrap()),
            vcpus: 1.try_into().unwrap(),
            memory: 128.try_into().unwrap(),
            kernel: "/nowhere".into(),
            initrd: "/nowhere".into(),
            disks: vec![],
            slots: Default::default(),
            machine: Default::default(),
            nic: None,
            state_dir: "/nowhere".into(),
            run_dir: "/nowhere".into(),
            accelerator: Accelerator::Tcg,
            driver: driver.to_owned(),
        }
    }

    #[tokio::test]
    async fn each_machine_is_its_own_drivers_and_one_without_a_word_is_the_firsts() {
        let (ours, theirs) = (FakeMachines::new(), FakeMachines::new());
        let other = FakeDriver::named(theirs.clone(), "other");
        let drivers = Drivers::new(Arc::new(FakeDriver::new(ours.clone())), vec![Arc::new(other)]);
        let first = drivers.start(&recipe("")).await.unwrap();
        let second = drivers.start(&recipe("other")).await.unwrap();
        assert_eq!((ours.running(), theirs.running()), (1, 1));
        assert_eq!(drivers.find(&recipe("fake")).await.unwrap(), Some(first));
        assert_eq!(drivers.find(&recipe("other")).await.unwrap(), Some(second));
        drivers.kill(second).await.unwrap();
        drivers.exited(second).await.unwrap();
        assert_eq!((ours.running(), theirs.running()), (1, 0));
        match drivers.start(&recipe("absent")).await {
            Err(DriverError::Unknown { name }) => assert_eq!(name, "absent"),
            other => panic!("{other:?}"),
        }
        assert!(drivers.snapshots(&recipe("absent")).is_none());
    }

    #[tokio::test]
    async fn the_drivers_of_a_node_conform_as_one_does() {
        let other = Arc::new(FakeDriver::named(FakeMachines::new(), "other"));
        let ours = FakeMachines::new();
        let both = || Drivers::new(Arc::new(FakeDriver::new(ours.clone())), vec![other.clone()]);
        for name in ["", "other"] {
            crate::conformance::check_snapshots(&both(), &recipe(name)).await;
            crate::conformance::check_templates(&both(), &recipe(name)).await;
        }
    }
}
