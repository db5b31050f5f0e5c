//! Names that the market gives: typed, so that one cannot be passed for another.

use std::{borrow::Borrow, fmt, ops::Deref};

macro_rules! name {
    ($(#[$doc:meta])* $type:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $type(String);

        impl From<String> for $type {
            fn from(name: String) -> Self {
                Self(name)
            }
        }

        impl From<&str> for $type {
            fn from(name: &str) -> Self {
                Self(name.to_owned())
            }
        }

        impl Deref for $type {
            type Target = str;

            fn deref(&self) -> &str {
                &self.0
            }
        }

        // `Ord` and `Hash` of the name are those of its text, so maps can be asked by `&str`.
        impl Borrow<str> for $type {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }
    };
}

name!(
    /// A bid.
    BidName
);
name!(
    /// A market, `<type>/<region>`.
    MarketName
);
name!(
    /// An allocation.
    AllocationName
);

impl MarketName {
    /// The market of an instance type in a region.
    #[must_use]
    pub fn new(instance_type: &str, region: &str) -> Self {
        Self(format!("{instance_type}/{region}"))
    }

    /// Instance type and region; the region is empty when the name has none.
    #[must_use]
    pub fn parts(&self) -> (&str, &str) {
        self.0.split_once('/').unwrap_or((&self.0, ""))
    }

    /// The instance type.
    #[must_use]
    pub fn instance_type(&self) -> &str {
        self.parts().0
    }

    /// The region.
    #[must_use]
    pub fn region(&self) -> &str {
        self.parts().1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn market_parts_table() {
        for (why, name, want) in [
            ("type and region", "a100-4x/us-west-2", ("a100-4x", "us-west-2")),
            ("no region", "a100-4x", ("a100-4x", "")),
            ("a region may have slashes", "a/b/c", ("a", "b/c")),
        ] {
            assert_eq!(MarketName::from(name).parts(), want, "{why}");
        }
        assert_eq!(MarketName::new("a", "b"), MarketName::from("a/b"));
    }
}
