//! Metadata of an image's root by path. Pure, except for reading layers.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use coracle_oci::OciError;

use crate::{
    Budget, Compression, DecompressReader, ImageError,
    content::ContentStore,
    manifest::ImageManifest,
    rootfs::kept_bytes,
    tarball::{
        self, Kind, Member,
        path::{Name, classify, components},
    },
};

/// Properties of a file by which it is compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FileProperties {
    /// Directory. Its time is not compared, because it changes with every entry.
    Dir {
        mode: u16,
        owner: (u32, u32),
    },
    File {
        mode: u16,
        owner: (u32, u32),
        seconds: i64,
        bytes: u64,
    },
    Symlink {
        owner: (u32, u32),
        to: Vec<u8>,
    },
    Device {
        mode: u16,
        owner: (u32, u32),
        of: Kind,
    },
}

impl FileProperties {
    pub(super) fn of(member: &Member) -> Self {
        let (mode, owner) = (member.mode, (member.uid, member.gid));
        match &member.kind {
            Kind::Dir => Self::Dir { mode, owner },
            Kind::File | Kind::HardLink(_) => {
                // The tar stream of a VM has no times before 1970.
                Self::File { mode, owner, seconds: member.mtime.0.max(0), bytes: member.size_bytes }
            }
            Kind::Symlink(to) => Self::Symlink { owner, to: to.clone() },
            of => Self::Device { mode, owner, of: of.clone() },
        }
    }
}

/// Files of an image by path.
#[derive(Debug, Default)]
pub(super) struct Listing(BTreeMap<Vec<u8>, FileProperties>);

impl Listing {
    /// Reads the layers from the lowest to the topmost and merges them. Blocking.
    pub(super) fn read(
        inner: &ContentStore,
        manifest: &ImageManifest,
        config: &Value,
    ) -> Result<Self, ImageError> {
        let limits = &inner.options.limits;
        let mut budget = Budget::of(limits);
        let mut all = Self::default();
        for (n, layer) in manifest.layers.iter().enumerate() {
            let compression = Compression::of_media_type(&layer.media_type)?;
            let path = inner.layout.blob(&layer.digest);
            let mut stream = DecompressReader::open(&path, compression, &mut budget, None)?;
            let mut members = Vec::new();
            let mut archive = tarball::Reader::new(&mut stream, limits);
            while let Some(member) = archive.next_member()? {
                archive.input_mut().count_entry()?;
                archive.input_mut().charge_metadata(kept_bytes(&member))?;
                members.push(member);
            }
            archive.drain()?;
            // Verifies the stored bytes again, because the result of the comparison becomes an image.
            let actual = stream.digest();
            let said = config["rootfs"]["diff_ids"][n].as_str().and_then(|d| d.parse().ok());
            if let Some(expected) = said.filter(|d| *d != actual) {
                let what = format!("unpacked layer {}", layer.digest);
                return Err(OciError::digest_mismatch(what, expected, actual).into());
            }
            all.apply_layer(&members, limits)?;
        }
        Ok(all)
    }

    /// Applies the members of one layer. Whiteouts come first: they hide names of lower layers only, wherever they are in the
    /// archive.
    fn apply_layer(&mut self, members: &[Member], limits: &crate::Limits) -> Result<(), ImageError> {
        for member in members {
            match classify(&member.path, limits)? {
                Name::Whiteout { above, name } => {
                    self.remove(&[above.as_slice(), &[name]].concat().join(&b'/'))
                }
                Name::Opaque { dir } => self.remove_below(&dir.join(&b'/')),
                Name::Root | Name::Ignored | Name::Entry { .. } => {}
            }
        }
        for member in members {
            let Name::Entry { above, name } = classify(&member.path, limits)? else { continue };
            let path = [above.as_slice(), &[name]].concat().join(&b'/');
            let what = match &member.kind {
                Kind::HardLink(to) => {
                    let to = components(to, limits)?.join(&b'/');
                    self.0.get(&to).cloned().unwrap_or_else(|| FileProperties::of(member))
                }
                _ => FileProperties::of(member),
            };
            if !matches!(what, FileProperties::Dir { .. }) {
                self.remove_below(&path);
            }
            self.0.insert(path, what);
        }
        Ok(())
    }

    fn remove(&mut self, path: &[u8]) {
        self.0.remove(path);
        self.remove_below(path);
    }

    fn remove_below(&mut self, path: &[u8]) {
        let begin = [path, b"/"].concat();
        let below =
            self.0.range(begin.clone()..).take_while(|(p, _)| path.is_empty() || p.starts_with(&begin));
        let below: Vec<_> = below.map(|(p, _)| p.clone()).collect();
        for path in below {
            self.0.remove(&path);
        }
    }

    pub(super) fn has(&self, path: &[u8], what: &FileProperties) -> bool {
        self.0.get(path) == Some(what)
    }

    /// Paths to hide by whiteouts: those not in `seen`, and of a deleted directory only the directory. Skips paths below
    /// `mounts`.
    pub(super) fn deleted_paths(&self, seen: &BTreeSet<Vec<u8>>, mounts: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        let mut last: Option<Vec<u8>> = None;
        for path in self.0.keys().filter(|path| !seen.contains(*path)) {
            let below = |dir: &[u8]| path.strip_prefix(dir).is_some_and(|rest| rest.starts_with(b"/"));
            if mounts.iter().any(|mount| below(mount)) || last.as_deref().is_some_and(below) {
                continue;
            }
            let (above, name) = match path.iter().rposition(|b| *b == b'/') {
                Some(at) => path.split_at(at + 1),
                None => (&[][..], path.as_slice()),
            };
            found.push([above, b".wh.", name].concat());
            last = Some(path.clone());
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Limits;

    fn member(path: &str, kind: Kind, size_bytes: u64) -> Member {
        Member {
            path: path.into(),
            kind,
            size_bytes,
            mode: 0o644,
            uid: 0,
            gid: 0,
            mtime: (5, 700),
            xattrs: BTreeMap::new(),
            sparse: None,
        }
    }

    fn names(listing: &Listing) -> Vec<String> {
        listing.0.keys().map(|p| String::from_utf8_lossy(p).into_owned()).collect()
    }

    #[test]
    fn upper_layers_replace_lower_entries() {
        let limits = Limits::default();
        let mut listing = Listing::default();
        let file = |path| member(path, Kind::File, 1);
        let dir = |path| member(path, Kind::Dir, 0);
        listing
            .apply_layer(&[dir("a"), file("a/x"), file("a/y"), dir("b"), file("b/x"), file("c")], &limits)
            .unwrap();
        let link = member("l", Kind::HardLink(b"/c".to_vec()), 0);
        let upper = [file("a/.wh.x"), file("b/.wh..wh..opq"), file("b/new"), file(".wh.nothing"), link];
        listing.apply_layer(&upper, &limits).unwrap();
        assert_eq!(names(&listing), ["a", "a/y", "b", "b/new", "c", "l"]);
        assert!(listing.has(b"l", &FileProperties::of(&file("c"))), "a link is what it links to");
        listing.apply_layer(&[file("a")], &limits).unwrap();
        assert_eq!(names(&listing), ["a", "b", "b/new", "c", "l"], "a file in the place of a folder");
    }

    #[test]
    fn deleted_directory_has_one_whiteout() {
        let limits = Limits::default();
        let mut listing = Listing::default();
        let dir = |path| member(path, Kind::Dir, 0);
        let file = |path| member(path, Kind::File, 1);
        let all = [
            dir("a"),
            file("a/x"),
            file("a/y"),
            file("a-b"),
            dir("proc"),
            file("proc/of-the-image"),
            file("z"),
        ];
        listing.apply_layer(&all, &limits).unwrap();
        let seen = ["a-b", "proc"].map(|p| p.as_bytes().to_vec()).into();
        let gone = listing.deleted_paths(&seen, &[b"proc"]);
        assert_eq!(gone, [b".wh.a".to_vec(), b".wh.z".to_vec()]);
        let seen = ["a", "a/x", "a-b", "proc", "z"].map(|p| p.as_bytes().to_vec()).into();
        assert_eq!(listing.deleted_paths(&seen, &[b"proc"]), [b"a/.wh.y".to_vec()]);
    }

    #[test]
    fn file_properties_equality_table() {
        let base = member("x", Kind::File, 5);
        for (why, other, same) in [
            ("nanoseconds are not in a stream", Member { mtime: (5, 0), ..base.clone() }, true),
            ("another second", Member { mtime: (6, 700), ..base.clone() }, false),
            ("another size", Member { size_bytes: 6, ..base.clone() }, false),
            ("another mode", Member { mode: 0o600, ..base.clone() }, false),
            ("another owner", Member { uid: 1, ..base.clone() }, false),
            ("another kind", Member { kind: Kind::Fifo, ..base.clone() }, false),
        ] {
            assert_eq!(FileProperties::of(&base) == FileProperties::of(&other), same, "{why}");
        }
        let dir = member("d", Kind::Dir, 0);
        assert_eq!(
            FileProperties::of(&dir),
            FileProperties::of(&Member { mtime: (9, 9), ..dir.clone() }),
            "a folder's time says nothing"
        );
    }
}
