//! Table of the open streams of a connection; decides about the frames of each stream. Pure.

use std::collections::{BTreeSet, HashMap};

use super::frame::{Reset, StreamId};

/// Most closed streams that are remembered because late frames for them get no further reply.
const SILENT_MAX: usize = 1024;

/// State of the server's half of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Local {
    /// Data may be sent.
    Open,
    /// The end was sent.
    Ended,
    /// Both halves were reset.
    Reset,
}

/// Stream that knows the state of the server's half.
pub(crate) trait Half {
    /// Returns the state of the server's half.
    fn local(&self) -> Local;
}

/// Decision about a data frame.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Arrival<'a, S> {
    /// The stream takes the data.
    Deliver(&'a mut S),
    /// The frame was in flight when the stream was closed, and is ignored.
    Discard,
    /// The stream must be reset, if it is open, with this status.
    Answer(Reset),
}

/// Streams of one connection.
#[derive(Debug)]
pub(crate) struct Table<S> {
    last: StreamId,
    open: HashMap<StreamId, Entry<S>>,
    silent: BTreeSet<StreamId>,
    open_max: usize,
}

#[derive(Debug)]
struct Entry<S> {
    stream: S,
    remote_ended: bool,
}

impl<S: Half> Table<S> {
    pub(crate) fn new(open_max: usize) -> Self {
        Self { last: StreamId(0), open: HashMap::new(), silent: BTreeSet::new(), open_max }
    }

    /// Checks whether the client may open stream `id`; [`Self::insert`] must follow then.
    ///
    /// # Errors
    /// The status for a reset of the stream, and of an open stream with this id.
    pub(crate) fn admit(&mut self, id: StreamId) -> Result<(), Reset> {
        if id.0.is_multiple_of(2) || id <= self.last {
            self.mute_stream(id);
            return Err(Reset::Protocol);
        }
        self.last = id;
        if self.open.len() >= self.open_max {
            self.sweep();
        }
        if self.open.len() >= self.open_max {
            self.mute_stream(id);
            return Err(Reset::Refused);
        }
        Ok(())
    }

    /// Adds a stream that was admitted. `remote_ended`: the client sends no data on it.
    pub(crate) fn insert(&mut self, id: StreamId, stream: S, remote_ended: bool) {
        self.open.insert(id, Entry { stream, remote_ended });
    }

    /// Decides about data for stream `id`.
    pub(crate) fn arrival(&mut self, id: StreamId) -> Arrival<'_, S> {
        let Some(entry) = self.open.get(&id) else {
            return self.answer_once(id, Reset::InvalidStream);
        };
        if entry.stream.local() == Local::Reset {
            self.close(id);
            self.mute_stream(id);
            return Arrival::Discard;
        }
        if entry.remote_ended {
            return self.answer_once(id, Reset::AlreadyClosed);
        }
        match self.open.get_mut(&id) {
            Some(entry) => Arrival::Deliver(&mut entry.stream),
            None => Arrival::Discard,
        }
    }

    /// Records that the client ended its half of stream `id`.
    pub(crate) fn remote_end(&mut self, id: StreamId) {
        if let Some(entry) = self.open.get_mut(&id) {
            entry.remote_ended = true;
            if entry.stream.local() != Local::Open {
                self.open.remove(&id);
            }
        }
    }

    /// Removes stream `id`.
    pub(crate) fn close(&mut self, id: StreamId) -> Option<S> {
        self.open.remove(&id).map(|entry| entry.stream)
    }

    /// Returns all open streams.
    pub(crate) fn streams(&self) -> impl Iterator<Item = &S> {
        self.open.values().map(|entry| &entry.stream)
    }

    fn answer_once(&mut self, id: StreamId, status: Reset) -> Arrival<'_, S> {
        if self.silent.contains(&id) {
            return Arrival::Discard;
        }
        self.mute_stream(id);
        Arrival::Answer(status)
    }

    fn mute_stream(&mut self, id: StreamId) {
        self.silent.insert(id);
        if self.silent.len() > SILENT_MAX {
            self.silent.pop_first();
        }
    }

    /// Removes streams whose server half ended after the last frame of the client.
    fn sweep(&mut self) {
        let ended: Vec<_> =
            self.open.iter().filter(|(_, entry)| entry.is_over()).map(|(id, _)| *id).collect();
        for id in ended {
            if self.close(id).is_some_and(|stream| stream.local() == Local::Reset) {
                self.mute_stream(id);
            }
        }
    }
}

impl<S: Half> Entry<S> {
    fn is_over(&self) -> bool {
        match self.stream.local() {
            Local::Open => false,
            Local::Ended => self.remote_ended,
            Local::Reset => true,
        }
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
