//! First-fit bin packing with several resources. Pure.

use std::collections::HashMap;

use crate::observe::facts::Resources;

/// Free amounts of all bins in one vector: there may be thousands of bins, and as many pods.
#[derive(Debug)]
pub(crate) struct Bins<'a> {
    names: Vec<&'a str>,
    /// One row for each bin, with one amount for each name.
    free: Vec<i128>,
    /// First bin that may have room for a request. Room only shrinks, so no earlier bin has.
    from: HashMap<Vec<i128>, usize>,
}

impl<'a> Bins<'a> {
    /// Creates an empty set of bins for the resources that pods request.
    pub(crate) fn of(names: impl IntoIterator<Item = &'a str>) -> Self {
        let mut names: Vec<_> = names.into_iter().collect();
        names.sort_unstable();
        names.dedup();
        if names.is_empty() {
            // The number of bins is derived from rows, so a row must not be empty.
            names.push("");
        }
        Self { names, free: Vec::new(), from: HashMap::new() }
    }

    fn row(&self, resources: &Resources) -> Vec<i128> {
        self.names.iter().map(|name| resources.get(*name).copied().unwrap_or(0)).collect()
    }

    pub(crate) fn push(&mut self, free: &Resources) {
        let row = self.row(free);
        self.free.extend(row);
    }

    pub(crate) fn len(&self) -> usize {
        self.free.len() / self.names.len()
    }

    /// Places a request into the first bin with room, and returns its index.
    pub(crate) fn place(&mut self, wanted: &Resources) -> Option<usize> {
        let (wish, width) = (self.row(wanted), self.names.len());
        let from = self.from.get(&wish).copied().unwrap_or(0);
        let has_room = |free: &[i128]| free.iter().zip(&wish).all(|(free, wanted)| free >= wanted);
        let found = self.free.chunks_exact(width).skip(from).position(has_room).map(|n| from + n);
        let place = found.unwrap_or_else(|| self.len());
        if found.is_some() {
            let row = &mut self.free[place * width..][..width];
            row.iter_mut().zip(&wish).for_each(|(free, wanted)| *free -= wanted);
        }
        self.from.insert(wish, place);
        found
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn resources(amounts: &[i128]) -> Resources {
        let names = ["a", "b", "c"];
        names.iter().zip(amounts).filter(|(_, n)| **n > 0).map(|(name, n)| ((*name).to_owned(), *n)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

        /// Placement equals a linear search over all bins.
        #[test]
        fn placement_equals_linear_first_fit(
            bins in prop::collection::vec(prop::array::uniform3(0i128..8), 0..12),
            wishes in prop::collection::vec((prop::array::uniform3(0i128..5), any::<bool>()), 0..40),
        ) {
            let mut quick = Bins::of(["b", "c", "a", "a"]);
            let mut plain: Vec<Resources> = bins.iter().map(|bin| resources(bin)).collect();
            plain.iter().for_each(|bin| quick.push(bin));
            for (wish, grow) in wishes {
                let wish = resources(&wish);
                let want = plain.iter().position(|free| crate::plan::demand::has_room(free, &wish));
                prop_assert_eq!(quick.place(&wish), want);
                if let Some(place) = want {
                    crate::plan::demand::take(&mut plain[place], &wish);
                }
                if grow {
                    plain.push(resources(&[4, 4, 4]));
                    quick.push(&resources(&[4, 4, 4]));
                }
                prop_assert_eq!(quick.len(), plain.len());
            }
        }
    }
}
