use std::cell::Cell;
use std::rc::Rc;

use super::*;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Stream(Rc<Cell<Local>>);

impl Half for Stream {
    fn local(&self) -> Local {
        self.0.get()
    }
}

fn id(n: u32) -> StreamId {
    StreamId(n)
}

fn open(table: &mut Table<Stream>, n: u32) -> Result<Stream, Reset> {
    table.admit(id(n))?;
    let stream = Stream(Rc::new(Cell::new(Local::Open)));
    table.insert(id(n), stream.clone(), false);
    Ok(stream)
}

/// Returns the decision about data for a stream: `deliver`, `discard`, or the status of the reply.
fn data(table: &mut Table<Stream>, n: u32) -> String {
    match table.arrival(id(n)) {
        Arrival::Deliver(_) => "deliver".to_owned(),
        Arrival::Discard => "discard".to_owned(),
        Arrival::Answer(status) => format!("{status:?}"),
    }
}

#[test]
fn stream_ids_are_odd_and_rise() {
    let mut table = Table::new(10);
    for (why, n, want) in [
        ("zero", 0, Some(Reset::Protocol)),
        ("the first", 1, None),
        ("even", 2, Some(Reset::Protocol)),
        ("a gap is allowed", 7, None),
        ("an earlier one", 5, Some(Reset::Protocol)),
        ("the same", 7, Some(Reset::Protocol)),
        ("the highest", 0x7fff_ffff, None),
    ] {
        assert_eq!(open(&mut table, n).err(), want, "{why}");
    }
    assert_eq!(table.last, id(0x7fff_ffff));
    assert_eq!(data(&mut table, 1), "deliver");
    assert!(table.close(id(7)).is_some());
    assert_eq!(data(&mut table, 7), "discard", "it was reset when it was opened again");
}

#[test]
fn data_of_closed_streams_are_answered_once() {
    let mut table = Table::new(10);
    let ended = open(&mut table, 1).unwrap();
    ended.0.set(Local::Ended);
    assert_eq!(data(&mut table, 1), "deliver", "half-closed by us");
    table.remote_end(id(1));
    let late = open(&mut table, 3).unwrap();
    table.remote_end(id(3));
    late.0.set(Local::Open);
    let reset = open(&mut table, 5).unwrap();
    reset.0.set(Local::Reset);
    open(&mut table, 7).unwrap();
    assert!(table.close(id(7)).is_some(), "the client reset it");
    for (why, n, first) in [
        ("both halves ended", 1, "InvalidStream"),
        ("data after its end", 3, "AlreadyClosed"),
        ("on its way when we reset the stream", 5, "discard"),
        ("the client reset it", 7, "InvalidStream"),
        ("never opened", 9, "InvalidStream"),
        ("even", 2, "InvalidStream"),
    ] {
        assert_eq!(data(&mut table, n), first, "{why}");
        assert_eq!(data(&mut table, n), "discard", "{why}");
    }
}

#[test]
fn open_streams_are_bounded_and_closed_ones_swept() {
    let mut table = Table::new(3);
    let streams: Vec<_> = [1, 3, 5].map(|n| open(&mut table, n).unwrap()).into();
    assert_eq!(open(&mut table, 7), Err(Reset::Refused));
    streams[0].0.set(Local::Reset);
    streams[1].0.set(Local::Ended);
    open(&mut table, 9).unwrap();
    assert_eq!(open(&mut table, 11), Err(Reset::Refused), "the client has not ended 3");
    table.remote_end(id(3));
    open(&mut table, 13).unwrap();
    assert_eq!(data(&mut table, 1), "discard");
    assert_eq!(data(&mut table, 7), "discard", "it was refused");
}

#[test]
fn memory_of_silenced_streams_is_bounded() {
    let mut table = Table::<Stream>::new(3);
    for n in 0..5000 {
        assert_eq!(data(&mut table, n), "InvalidStream");
    }
    assert_eq!(table.silent.len(), SILENT_MAX);
}
