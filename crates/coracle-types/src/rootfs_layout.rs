//! Layout of the root file system of an image.

use std::path::Path;

use serde::{Deserialize, Serialize};

/// Place of the root directory in the EROFS file of an image. A guest that was saved with the file mounted needs the same bytes
/// when it is restored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RootfsLayout {
    /// With all other inodes, behind the data.
    #[default]
    RootLast,
    /// In the first block, with the same inode number and size in every file: a kernel that has mounted one such file, and has
    /// read nothing below its root, can continue with another one in its place.
    RootFirst,
}

impl RootfsLayout {
    /// Number of the root directory's inode in a file with [`RootfsLayout::RootFirst`].
    pub const FIRST_ROOT_INODE: u64 = 64;
    /// Size of the root directory in a file with [`RootfsLayout::RootFirst`], bytes: with its inode it fills the half of the
    /// first block behind the superblock.
    pub const FIRST_ROOT_LEN: usize = 1984;

    /// Extension of the file's name.
    #[must_use]
    pub fn extension(self) -> &'static str {
        match self {
            Self::RootLast => "erofs",
            Self::RootFirst => "erofs2",
        }
    }

    /// Layout of a file, by its name.
    #[must_use]
    pub fn of(path: &Path) -> Self {
        let extension = path.extension().and_then(|extension| extension.to_str());
        if extension == Some(Self::RootFirst.extension()) { Self::RootFirst } else { Self::RootLast }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_is_derived_from_the_file_extension() {
        for layout in [RootfsLayout::RootLast, RootfsLayout::RootFirst] {
            assert_eq!(RootfsLayout::of(&Path::new("/images/0a").with_extension(layout.extension())), layout);
        }
        assert_eq!(RootfsLayout::of(Path::new("")), RootfsLayout::RootLast);
    }
}
