//! Table that reuses the rows of removed values. An id includes the number of uses of its row, so that it never names a later
//! value.

/// Values by row. The id of a value is `(place, use)`, packed in a `u64`.
#[derive(Clone, Debug)]
pub(crate) struct Slab<T> {
    pub(crate) rows: Vec<(u32, Option<T>)>,
    pub(crate) vacant: Vec<u32>,
}

/// Optional reference from one row to another, by place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Link(u32);

impl Default for Link {
    fn default() -> Self {
        Self(u32::MAX)
    }
}

impl Link {
    pub(crate) const fn to(place: u32) -> Self {
        Self(place)
    }

    pub(crate) fn place(self) -> Option<u32> {
        (self != Self::default()).then_some(self.0)
    }
}

impl<T> Slab<T> {
    pub(crate) const fn new() -> Self {
        Self { rows: Vec::new(), vacant: Vec::new() }
    }

    /// Stores a value and returns its row.
    pub(crate) fn insert(&mut self, row: T) -> u32 {
        if let Some(place) = self.vacant.pop() {
            if let Some(vacant) = self.rows.get_mut(place as usize) {
                vacant.1 = Some(row);
            }
            return place;
        }
        self.rows.push((0, Some(row)));
        u32::try_from(self.rows.len() - 1).unwrap_or(u32::MAX)
    }

    pub(crate) fn remove(&mut self, place: u32) -> Option<T> {
        let (uses, row) = self.rows.get_mut(place as usize)?;
        let row = row.take()?;
        *uses = uses.wrapping_add(1);
        self.vacant.push(place);
        Some(row)
    }

    pub(crate) fn at(&self, place: u32) -> Option<&T> {
        self.rows.get(place as usize)?.1.as_ref()
    }

    pub(crate) fn at_mut(&mut self, place: u32) -> Option<&mut T> {
        self.rows.get_mut(place as usize)?.1.as_mut()
    }

    /// Id of the value in this row.
    pub(crate) fn id(&self, place: u32) -> u64 {
        let uses = self.rows.get(place as usize).map_or(0, |(uses, _)| *uses);
        u64::from(uses) << 32 | u64::from(place)
    }

    /// Row of the value with this id; `None` if the value was removed.
    pub(crate) fn place(&self, id: u64) -> Option<u32> {
        let place = u32::try_from(id & u64::from(u32::MAX)).ok()?;
        let (uses, row) = self.rows.get(place as usize)?;
        (u64::from(*uses) == id >> 32 && row.is_some()).then_some(place)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        (0u32..).zip(&self.rows).filter_map(|(place, (_, row))| Some((place, row.as_ref()?)))
    }
}
