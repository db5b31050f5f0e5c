//! Templates of VM shapes: one boot per shape, then every start of every image is a clone.
//!
//! ```text
//! start of a VM ─▶ key of its shape ─▶ template? ─yes─▶ clone
//!                                          └─no──▶ cold boot, then: take one in the background
//! <state>/templates/<key>/{manifest.json, ram, state, disk}   written last, renamed into place
//! ```
//! In memory a template consists of sealed files, which no VMM can change. On disk it has a digest, which is verified when it
//! is loaded after a restart. The guest in it was never configured and holds no secret.

mod manifest;
mod take;

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_files::FileDigests;
use coracle_hypervisor::{Driver as _, Template, VmmConfig};
use coracle_image::warmup_rootfs;
use tokio::sync::{OnceCell, mpsc, oneshot};

pub use self::manifest::TemplateInfo;
pub use self::take::{open_session, run as serve, sweep};
use crate::files;
use crate::node::Node;
use crate::{TemplateKey, TemplatePolicy};

/// Maximum number of queued shapes; further ones are dropped, and requested again by the next start.
const QUEUE: usize = 8;

/// A request for a template.
#[derive(Debug)]
pub struct TemplateRequest {
    /// Key of the template.
    pub key: TemplateKey,
    /// VMM config of the shape.
    pub vmm_config: VmmConfig,
    /// Size of the fresh disk that the guest is to have mounted, if the driver supports it.
    pub disk_mib: u64,
    /// Reply to the waiting caller, if any.
    pub reply: Option<oneshot::Sender<Result<TemplateInfo, String>>>,
}

/// Templates of a host.
#[derive(Debug)]
pub struct Templates {
    node: Arc<Node>,
    dir: PathBuf,
    digests: FileDigests,
    known: Mutex<HashMap<TemplateKey, Known>>,
    requests: mpsc::Sender<TemplateRequest>,
    /// Image that stands for those of VMs.
    warmup_image: OnceCell<PathBuf>,
}

#[derive(Clone, Debug)]
struct Known {
    info: TemplateInfo,
    /// `None`: on disk only.
    loaded: Option<Arc<Template>>,
}

impl Templates {
    /// Opens `<state>/templates` and removes templates of other versions. Directories that a crash left incomplete are removed
    /// by [`sweep`]. Blocking.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn open(node: Arc<Node>) -> io::Result<(Self, mpsc::Receiver<TemplateRequest>)> {
        let dir = node.config.state_dir.join("templates");
        std::fs::create_dir_all(&dir)?;
        let mut known = HashMap::new();
        for entry in std::fs::read_dir(&dir)? {
            let path = entry?.path();
            match manifest::read(&path) {
                Ok(info) if node.config.templates.enabled => {
                    known.insert(info.key.clone(), Known { info, loaded: None });
                }
                _ if take::is_part(&path) => {}
                _ => files::remove_tree(&path)?,
            }
        }
        let (requests, queue) = mpsc::channel(QUEUE);
        let (digests, known, warmup_image) = (FileDigests::default(), Mutex::new(known), OnceCell::new());
        Ok((Self { node, dir, digests, known, requests, warmup_image }, queue))
    }

    /// Returns the image that guests without a VM have instead of a VM's: its root directory comes first, and its program is the
    /// guest agent, which exits at once when it is run for a warm-up.
    ///
    /// # Errors
    /// When the agent cannot be read, or the file system is full.
    pub(crate) async fn warmup_image(&self) -> io::Result<&PathBuf> {
        let config = &self.node.config;
        let make = || async {
            let dir = config.state_dir.join("cache");
            let (agent, image) = (config.agent.clone(), dir.join("stand-in.erofs"));
            let to = image.clone();
            let made = move || std::fs::create_dir_all(&dir).and_then(|()| warmup_rootfs(&agent, &to));
            files::blocking(made).await.map(|()| image)
        };
        self.warmup_image.get_or_try_init(make).await
    }

    fn policy(&self) -> &TemplatePolicy {
        &self.node.config.templates
    }

    fn known(&self) -> MutexGuard<'_, HashMap<TemplateKey, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the key of a VM's shape; `None` if the driver has no templates or they are disabled.
    pub async fn key(&self, vmm_config: &VmmConfig) -> Option<TemplateKey> {
        let driver = self.node.driver.templates(vmm_config).filter(|_| self.policy().enabled)?;
        let fingerprint = driver.fingerprint(vmm_config).await;
        match self.digests.of([&vmm_config.kernel, &vmm_config.initrd]).await {
            Ok(digests) => Some(TemplateKey::of(&fingerprint, &digests)),
            Err(error) => {
                tracing::warn!(%error, "kernel or initramfs cannot be read, no template");
                None
            }
        }
    }

    /// Returns the template of a shape, from memory or from disk. A template that cannot be used is removed.
    pub async fn get(&self, key: &TemplateKey) -> Option<Arc<Template>> {
        let found = self.known().get(key).cloned()?;
        if self.node.clock.now().since(found.info.taken_at) > self.policy().age_max {
            self.remove(key);
            return None;
        }
        if let Some(template) = found.loaded {
            return Some(template);
        }
        let (dir, info) = (self.dir.join(key.as_str()), found.info.clone());
        match files::blocking(move || manifest::load(&dir, &info)).await {
            Ok(template) => {
                let template = Arc::new(template);
                self.insert(found.info, template.clone());
                Some(template)
            }
            Err(error) => {
                tracing::warn!(template = key.as_str(), %error, "template cannot be used, removed");
                self.remove(key);
                None
            }
        }
    }

    /// Queues a request for a template. Never waits.
    pub fn request(&self, key: TemplateKey, vmm_config: VmmConfig, disk_mib: u64) {
        if self.known().contains_key(&key) {
            return;
        }
        if self.requests.try_send(TemplateRequest { key, vmm_config, disk_mib, reply: None }).is_err() {
            tracing::debug!("too many shapes wait for a template");
        }
    }

    /// Finds or takes a template, and waits for it.
    pub async fn warm(
        &self,
        key: TemplateKey,
        vmm_config: VmmConfig,
        disk_mib: u64,
    ) -> Result<TemplateInfo, String> {
        let (reply, answer) = oneshot::channel();
        let request = TemplateRequest { key, vmm_config, disk_mib, reply: Some(reply) };
        let stopping = || "the node is stopping".to_owned();
        self.requests.send(request).await.map_err(|_| stopping())?;
        answer.await.map_err(|_| stopping())?
    }

    /// Returns all templates, by key.
    pub fn list(&self) -> Vec<TemplateInfo> {
        let mut all: Vec<_> = self.known().values().map(|known| known.info.clone()).collect();
        all.sort_by(|a, b| a.key.cmp(&b.key));
        all
    }

    /// Removes a template and its files. VMs that were cloned from it keep running. Returns whether it existed.
    pub fn remove(&self, key: &TemplateKey) -> bool {
        let known = self.known().remove(key).is_some();
        if let Err(error) = files::remove_tree(&self.dir.join(key.as_str())) {
            tracing::warn!(template = key.as_str(), %error, "template not removed");
        }
        known
    }

    /// Adds a template, and removes the oldest beyond the limits of the policy.
    fn insert(&self, info: TemplateInfo, template: Arc<Template>) {
        let mut known = self.known();
        known.insert(info.key.clone(), Known { info, loaded: Some(template) });
        let mut by_age: Vec<_> = known.values().map(|k| k.info.clone()).collect();
        drop(known);
        by_age.sort_by(|a, b| (a.taken_at, &a.key).cmp(&(b.taken_at, &b.key)));
        for info in by_age.iter().take(count_spare(&by_age, self.policy())) {
            self.remove(&info.key);
        }
    }
}

/// Returns how many of the templates, the oldest first, exceed the limits of the policy. The newest is always kept.
fn count_spare(by_age: &[TemplateInfo], policy: &TemplatePolicy) -> usize {
    let mut left = by_age.len();
    let mut bytes: u64 = by_age.iter().map(|info| info.ram_bytes).sum();
    let mut spare = 0;
    for info in by_age {
        if left <= 1 || (left <= policy.count_max && bytes <= policy.bytes_max) {
            break;
        }
        (left, bytes, spare) = (left - 1, bytes.saturating_sub(info.ram_bytes), spare + 1);
    }
    spare
}

#[cfg(test)]
mod tests {
    use coracle_types::{MemoryMib, UnixMillis, Vcpus};

    use super::*;

    #[test]
    fn oldest_templates_are_evicted_first() {
        let template = |ram_bytes| TemplateInfo {
            key: TemplateKey::of("x", &[]),
            vcpus: Vcpus::MIN,
            memory: MemoryMib::MIN,
            taken_at: UnixMillis(0),
            took_ms: 0,
            save_ms: 0,
            ram_bytes,
            disk_mib: 0,
        };
        for (why, sizes, count_max, bytes_max, want) in [
            ("none", &[][..], 2, 10, 0),
            ("they fit", &[5, 5], 2, 10, 0),
            ("too many", &[1, 1, 1], 2, 10, 1),
            ("too large", &[5, 5, 5], 8, 10, 1),
            ("both", &[9, 1, 1, 1], 3, 2, 2),
            ("the newest stays", &[20], 0, 10, 0),
            ("and alone", &[1, 20], 8, 10, 1),
        ] {
            let templates: Vec<_> = sizes.iter().map(|bytes| template(*bytes)).collect();
            let policy = TemplatePolicy { count_max, bytes_max, ..TemplatePolicy::default() };
            assert_eq!(count_spare(&templates, &policy), want, "{why}");
        }
    }
}
