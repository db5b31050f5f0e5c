//! Names that the market assigns: typed, so that one kind cannot be passed for another.

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

        // `Ord` and `Hash` of the name equal those of its text, so a map can be looked up by `&str`.
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
    /// Name of a bid.
    BidName
);
name!(
    /// Name of a market, `<type>/<region>`.
    MarketName
);
name!(
    /// Name of an allocation.
    AllocationName
);

impl MarketName {
    /// Name of the market of an instance type in a region.
    #[must_use]
    pub fn new(instance_type: &str, region: &str) -> Self {
        Self(format!("{instance_type}/{region}"))
    }

    /// Splits the name into instance type and region; the region is empty if the name has none.
    #[must_use]
    pub fn parts(&self) -> (&str, &str) {
        self.0.split_once('/').unwrap_or((&self.0, ""))
    }

    /// Instance type of the market.
    #[must_use]
    pub fn instance_type(&self) -> &str {
        self.parts().0
    }

    /// Region of the market.
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
