//! Images: one for each image configuration, with all names by which it was pulled.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use coracle_host::{DiskImage, NodeImage, PullPolicy};
use coracle_image::{Image, ImageName, PullOptions};
use coracle_oci::{Credentials, Digest, NoProgress, OciError, Reference, Secret};
use coracle_proto::cri::{
    self, AuthConfig, FilesystemIdentifier, FilesystemUsage, ImageFsInfoResponse, ImageSpec, Int64Value,
    UInt64Value,
};
use tonic::Status;

use crate::refusal::{Refusal, of_host, of_image, of_pull};
use crate::server::CriServer;
use crate::status::nanoseconds;

/// Content of an image.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Content {
    /// A container image: one of the images with this configuration.
    Container(Box<Image>),
    /// A disk image.
    Disk(DiskImage),
}

/// Image as the kubelet sees it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StoredImage {
    /// `sha256:…` of the configuration, or the digest of a disk image.
    pub(crate) id: String,
    pub(crate) repo_tags: Vec<String>,
    pub(crate) repo_digests: Vec<String>,
    pub(crate) content: Content,
    /// Size in bytes, never 0.
    size: u64,
    /// Digests of all manifests with this configuration.
    manifests: BTreeSet<Digest>,
    /// Digests of manifests and indexes by which the image was pulled.
    known_as: BTreeSet<Digest>,
}

impl StoredImage {
    /// Returns a reference with a digest, or the id.
    pub(crate) fn reference(&self) -> String {
        self.repo_digests.first().unwrap_or(&self.id).clone()
    }

    /// Returns whether the image has this manifest.
    pub(crate) fn has(&self, manifest: &Digest) -> bool {
        self.manifests.contains(manifest)
    }

    fn is(&self, wanted: &Wanted) -> bool {
        match wanted {
            Wanted::Id(digest) => self.id == digest.to_string() || self.manifests.contains(digest),
            Wanted::Reference(reference) => match reference.digest() {
                None => self.repo_tags.contains(&reference.to_string()),
                Some(digest) => {
                    let repository = format!("{}/{}@", reference.registry(), reference.repository());
                    let in_repository = |known: &String| known.starts_with(&repository);
                    self.known_as.contains(digest) && self.repo_digests.iter().any(in_repository)
                }
            },
        }
    }

    fn to_message(&self, pinned: &[String]) -> cri::Image {
        let (uid, username) = match &self.content {
            Content::Container(image) => user(&image.config.user),
            Content::Disk(_) => user(""),
        };
        cri::Image {
            id: self.id.clone(),
            repo_tags: self.repo_tags.clone(),
            repo_digests: self.repo_digests.clone(),
            size: self.size,
            uid,
            username,
            spec: Some(ImageSpec { image: self.id.clone(), ..ImageSpec::default() }),
            pinned: self.repo_tags.iter().any(|tag| pinned.contains(tag)),
        }
    }
}

/// Parsed argument that names an image.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Wanted {
    Id(Digest),
    Reference(Reference),
}

/// Parses an id `sha256:…`, its 64 digits, or a reference. Pure.
fn parse_wanted(text: &str) -> Result<Wanted, OciError> {
    let hex = text.strip_prefix("sha256:").unwrap_or(text);
    match Digest::from_hex(hex) {
        Ok(digest) if hex.len() == 64 => Ok(Wanted::Id(digest)),
        _ => text.parse().map(Wanted::Reference),
    }
}

/// Groups images by configuration. Pure.
fn group(images: Vec<Image>, names: &[ImageName]) -> Vec<StoredImage> {
    let mut groups: BTreeMap<Digest, StoredImage> = BTreeMap::new();
    for image in images {
        let (config, digest) = (image.config_digest, image.digest);
        let stored = groups.entry(config).or_insert_with(|| StoredImage {
            id: config.to_string(),
            repo_tags: vec![],
            repo_digests: vec![],
            size: image.size_bytes,
            content: Content::Container(Box::new(image)),
            manifests: BTreeSet::new(),
            known_as: BTreeSet::new(),
        });
        stored.manifests.insert(digest);
        stored.known_as.insert(digest);
        for name in names.iter().filter(|name| name.digest == digest) {
            let reference = &name.reference;
            stored.known_as.extend(name.index.iter().chain(reference.digest()));
            let repository = format!("{}/{}", reference.registry(), reference.repository());
            let known = reference.digest().or(name.index.as_ref()).unwrap_or(&digest);
            let repo_digest = format!("{repository}@{known}");
            if !stored.repo_digests.contains(&repo_digest) {
                stored.repo_digests.push(repo_digest);
            }
            if reference.digest().is_none() {
                stored.repo_tags.push(reference.to_string());
            }
        }
    }
    groups.into_values().collect()
}

/// Returns the entry of a disk image, which takes `bytes` on the node. Pure.
fn of_disk(image: DiskImage, bytes: u64) -> Option<StoredImage> {
    let digest: Digest = image.digest.parse().ok()?;
    let names = image.names.iter().filter_map(|name| name.parse::<Reference>().ok());
    let (mut repo_tags, mut repo_digests) = (vec![], vec![]);
    for name in names {
        let repo_digest = format!("{}/{}@{digest}", name.registry(), name.repository());
        if !repo_digests.contains(&repo_digest) {
            repo_digests.push(repo_digest);
        }
        if name.digest().is_none() {
            repo_tags.push(name.to_string());
        }
    }
    Some(StoredImage {
        id: digest.to_string(),
        repo_tags,
        repo_digests,
        size: bytes.max(1),
        content: Content::Disk(image),
        manifests: [digest].into(),
        known_as: [digest].into(),
    })
}

/// Returns the user of an image for the kubelet: a uid, or a name that is not resolved. Pure.
fn user(user: &str) -> (Option<Int64Value>, String) {
    match user.split(':').next().unwrap_or_default() {
        "" => (Some(Int64Value { value: 0 }), String::new()),
        name => match name.parse() {
            Ok(value) => (Some(Int64Value { value }), String::new()),
            Err(_) => (None, name.to_owned()),
        },
    }
}

/// Returns the credentials of a pull. Pure.
fn credentials(auth: Option<AuthConfig>) -> Result<Credentials, Refusal> {
    let Some(auth) = auth else { return Ok(Credentials::Anonymous) };
    let invalid = || Refusal::invalid("credentials", "auth is not the base64 of user:password");
    Ok(match auth {
        AuthConfig { identity_token, .. } if !identity_token.is_empty() => {
            Credentials::Identity(Secret::new(identity_token))
        }
        AuthConfig { registry_token, .. } if !registry_token.is_empty() => {
            Credentials::Bearer(Secret::new(registry_token))
        }
        AuthConfig { username, password, .. } if !username.is_empty() => {
            Credentials::Basic { user: username, password: Secret::new(password) }
        }
        AuthConfig { auth, .. } if !auth.is_empty() => {
            let text = STANDARD.decode(auth).ok().and_then(|bytes| String::from_utf8(bytes).ok());
            let text = text.ok_or_else(invalid)?;
            let (user, password) = text.split_once(':').ok_or_else(invalid)?;
            let password = Secret::new(password.trim_end_matches('\0'));
            Credentials::Basic { user: user.to_owned(), password }
        }
        _ => Credentials::Anonymous,
    })
}

impl CriServer {
    async fn stored_images(&self) -> Result<Vec<StoredImage>, Status> {
        let store = self.0.host.images();
        let images = store.list().await.map_err(|e| of_image(&e))?;
        let host = self.0.host.clone();
        let disks = tokio::task::spawn_blocking(move || {
            let disks = host.disk_images();
            let named = disks.list().into_iter().filter(|image| !image.names.is_empty());
            named.map(|image| (disks.allocated_bytes(&image), image)).collect::<Vec<_>>()
        });
        let disks = disks.await.map_err(|_| Status::unavailable("the server is stopping"))?;
        let disks = disks.into_iter().filter_map(|(bytes, image)| of_disk(image, bytes));
        Ok(group(images, &store.names()).into_iter().chain(disks).collect())
    }

    /// Returns the image with an id or a reference, if it is on this node.
    pub(crate) async fn stored_image(&self, text: &str) -> Result<Option<StoredImage>, Status> {
        let wanted = parse_wanted(text).map_err(|e| of_image(&e.into()))?;
        Ok(self.stored_images().await?.into_iter().find(|image| image.is(&wanted)))
    }

    pub(crate) async fn list_images(&self, filter: Option<&ImageSpec>) -> Result<Vec<cri::Image>, Status> {
        let pinned = &self.0.options.pinned_images;
        match filter.filter(|spec| !spec.image.is_empty()) {
            Some(spec) => Ok(self
                .stored_image(&spec.image)
                .await?
                .map(|image| image.to_message(pinned))
                .into_iter()
                .collect()),
            None => Ok(self.stored_images().await?.iter().map(|image| image.to_message(pinned)).collect()),
        }
    }

    /// Returns the status of an image; `Ok(None)` for an unknown one.
    pub(crate) async fn image_status(&self, spec: &ImageSpec) -> Result<Option<cri::Image>, Status> {
        let stored = self.stored_image(&spec.image).await?;
        Ok(stored.map(|image| image.to_message(&self.0.options.pinned_images)))
    }

    /// Pulls an image for pods of a namespace and returns its id. If the image is on the node already, the registry is queried
    /// and no content is transferred. A cancelled call leaves no image.
    pub(crate) async fn pull_image(
        &self,
        spec: &ImageSpec,
        auth: Option<AuthConfig>,
        namespace: &str,
    ) -> Result<String, Status> {
        let reference: Reference = spec.image.parse().map_err(|e: OciError| of_image(&e.into()))?;
        let options = PullOptions {
            policy: PullPolicy::Always,
            credentials: credentials(auth)?,
            ..PullOptions::default()
        };
        let store = self.0.host.images().clone();
        let pulled = self.0.host.ensure_image_as(&reference, &options, Arc::new(NoProgress)).await;
        let image = pulled.map_err(|e| of_pull(&e))?;
        self.check_pulled(namespace, &reference, &image, &options).await?;
        let image = match image {
            NodeImage::Container(image) => image,
            NodeImage::Disk(image) => return Ok(image.digest),
        };
        let id = image.config_digest.to_string();
        // Built in advance, because the first container would have to wait for it.
        self.0.tasks.spawn(async move {
            if let Err(error) = store.rootfs(&image).await {
                tracing::warn!(image = %image.digest, %error, "build root file system failed");
            }
        });
        Ok(id)
    }

    /// Removes an image with all of its names. `Ok` for an unknown one.
    pub(crate) async fn remove_image(&self, spec: &ImageSpec) -> Result<(), Status> {
        let Some(stored) = self.stored_image(&spec.image).await? else { return Ok(()) };
        match stored.content {
            Content::Container(_) => {
                let digests: Vec<_> = stored.manifests.into_iter().collect();
                self.0.host.images().remove_images(&digests).await.map_err(|e| of_image(&e))?;
            }
            Content::Disk(image) => {
                let names = image.names.iter().filter_map(|name| name.parse::<Reference>().ok());
                let removed = names.map(|name| self.0.host.disk_images().untag(&name));
                let removed: std::io::Result<()> = removed.collect();
                removed
                    .map_err(|e| Status::internal(format!("cannot remove image {}: {e}", image.digest)))?;
            }
        }
        let server = self.clone();
        self.0.tasks.spawn(async move { server.free_space().await });
        Ok(())
    }

    /// Removes the content of images without a name, a container and a VM.
    async fn free_space(&self) {
        let store = self.0.host.images();
        let pruned = async {
            let mut in_use: HashSet<Digest> = HashSet::new();
            let mut disks_in_use: HashSet<String> = HashSet::new();
            in_use.extend(store.list().await.map_err(|e| of_image(&e))?.iter().map(|image| image.digest));
            for view in self.0.host.list() {
                let of_containers = view.containers.values().flat_map(|record| record.images());
                let all = of_containers.chain([view.record.image_digest.as_str()]);
                in_use.extend(all.filter_map(|digest| digest.parse::<Digest>().ok()));
                disks_in_use.insert(view.record.image_digest.clone());
            }
            let snapshots = self.0.host.snapshots().await.map_err(|e| of_host(&e))?;
            in_use
                .extend(snapshots.iter().filter_map(|snapshot| snapshot.image_digest.parse::<Digest>().ok()));
            disks_in_use.extend(snapshots.iter().map(|snapshot| snapshot.image_digest.clone()));
            let host = self.0.host.clone();
            let pruned = tokio::task::spawn_blocking(move || host.prune_disk_images(&disks_in_use, false));
            let pruned = pruned.await.map_err(|_| Status::unavailable("the server is stopping"))?;
            pruned.map_err(|e| of_host(&e))?;
            store.prune(&in_use, false).await.map_err(|e| of_image(&e))
        };
        if let Err(error) = pruned.await {
            tracing::warn!(error = error.message(), "free space of removed images failed");
        }
    }

    pub(crate) async fn image_fs_info(&self) -> Result<ImageFsInfoResponse, Status> {
        let dir = self.0.host.images().dir().to_owned();
        let mountpoint = dir.display().to_string();
        let used = tokio::task::spawn_blocking(move || usage(&dir)).await;
        let (bytes, inodes) = used.map_err(|_| Status::unavailable("the server is stopping"))?;
        let usage = FilesystemUsage {
            timestamp: nanoseconds(self.0.host.clock().now()),
            fs_id: Some(FilesystemIdentifier { mountpoint }),
            used_bytes: Some(UInt64Value { value: bytes }),
            inodes_used: Some(UInt64Value { value: inodes }),
        };
        Ok(ImageFsInfoResponse { image_filesystems: vec![usage.clone()], container_filesystems: vec![usage] })
    }
}

/// Returns bytes and inodes below a directory. Files that are removed meanwhile do not count. Blocking.
fn usage(dir: &Path) -> (u64, u64) {
    let (mut bytes, mut inodes, mut open) = (0_u64, 0_u64, vec![dir.to_owned()]);
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let Ok(metadata) = entry.metadata() else { continue };
            (bytes, inodes) =
                (bytes.saturating_add(metadata.blocks().saturating_mul(512)), inodes.saturating_add(1));
            if metadata.is_dir() {
                open.push(entry.path());
            }
        }
    }
    (bytes, inodes)
}

#[cfg(test)]
mod tests {
    use coracle_image::ImageConfig;

    use super::*;

    fn image(manifest: &[u8], config: &[u8]) -> Image {
        Image {
            digest: Digest::of(manifest),
            config_digest: Digest::of(config),
            references: vec![],
            architecture: "amd64".into(),
            os: "linux".into(),
            config: ImageConfig::default(),
            layers: vec![],
            size_bytes: 1,
            chain_id: Digest::of(config),
            created: None,
        }
    }

    fn name(reference: &str, manifest: &[u8], index: Option<&[u8]>) -> ImageName {
        ImageName {
            reference: reference.parse().unwrap(),
            digest: Digest::of(manifest),
            index: index.map(Digest::of),
        }
    }

    #[test]
    fn images_with_the_same_config_are_grouped() {
        let images = vec![image(b"m1", b"c"), image(b"m2", b"c"), image(b"m3", b"other")];
        let names = [
            name("a.example/x:1", b"m1", Some(b"list")),
            name("a.example/x:2", b"m1", None),
            name("b.example/x:1", b"m2", None),
            name("c.example/y", b"m3", None),
        ];
        let stored = group(images, &names);
        assert_eq!(stored.len(), 2);
        let id = Digest::of(b"c").to_string();
        let one = stored.iter().find(|stored| stored.id == id).unwrap();
        assert_eq!(one.repo_tags, ["a.example/x:1", "a.example/x:2", "b.example/x:1"]);
        assert_eq!(one.repo_digests.len(), 3, "an index, its manifest, and another registry's");
        let list = format!("a.example/x@{}", Digest::of(b"list"));
        for (text, want) in [
            (id.as_str(), true),
            (id.strip_prefix("sha256:").unwrap(), true),
            ("a.example/x:1", true),
            (&list, true),
            (&format!("a.example/x:1@{}", Digest::of(b"list")), true),
            (&format!("c.example/x@{}", Digest::of(b"list")), false),
            ("a.example/x", false),
            ("a.example/x:3", false),
        ] {
            assert_eq!(one.is(&parse_wanted(text).unwrap()), want, "{text}");
        }
        let other = stored.iter().find(|stored| stored.id != id).unwrap();
        assert_eq!(other.repo_tags, ["c.example/y:latest"]);
        assert!(other.is(&parse_wanted("c.example/y").unwrap()));
    }

    #[test]
    fn users_table() {
        let uid = |value| Some(Int64Value { value });
        for (text, want) in [
            ("", (uid(0), "")),
            ("1002", (uid(1002), "")),
            ("1003:group", (uid(1003), "")),
            ("www-data", (None, "www-data")),
            ("www-data:group", (None, "www-data")),
        ] {
            let (got, name) = user(text);
            assert_eq!((got, name.as_str()), want, "{text:?}");
        }
    }

    #[test]
    fn credentials_table() {
        let auth = |text: &str| AuthConfig { auth: text.into(), ..AuthConfig::default() };
        let shown = |auth| credentials(auth).map(|found| format!("{found:?}"));
        assert_eq!(shown(None).unwrap(), "Anonymous");
        assert_eq!(shown(Some(AuthConfig::default())).unwrap(), "Anonymous");
        assert_eq!(shown(Some(auth(&STANDARD.encode("me:secret")))).unwrap(), "Basic(\"me\")");
        assert!(shown(Some(auth("?"))).is_err() && shown(Some(auth(&STANDARD.encode("me")))).is_err());
        let token = AuthConfig { registry_token: "t".into(), ..AuthConfig::default() };
        assert_eq!(shown(Some(token)).unwrap(), "Bearer");
        let identity = AuthConfig { identity_token: "t".into(), ..AuthConfig::default() };
        assert_eq!(shown(Some(identity)).unwrap(), "Identity");
    }
}
