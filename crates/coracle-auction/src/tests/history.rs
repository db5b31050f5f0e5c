//! Invariants of the journal: replay gives the same bytes, and no command takes effect twice.

use std::collections::BTreeMap;

use proptest::prelude::*;
use sha2::{Digest as _, Sha256};

use super::cases;
use super::world::{World, params};
use crate::codec::Codec;
use crate::*;

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn invariant_09_replay(tape in proptest::collection::vec(any::<u64>(), 1..32), cut in any::<usize>()) {
        let mut w = World::new(true);
        let mut events = w.events.clone();
        let (mut middle, mut tail_events) = (None, Vec::new());
        let cut = cut % tape.len();
        for (n, number) in tape.iter().enumerate() {
            if n == cut {
                middle = Some((w.market.snapshot(), w.journal.len()));
            }
            w.step(*number);
            events.extend(w.events.iter().cloned());
            if n >= cut {
                tail_events.extend(w.events.iter().cloned());
            }
        }
        let mut bytes = Vec::new();
        w.journal.put(&mut bytes);
        let journal = Vec::<Journaled>::get(&mut bytes.as_slice()).unwrap();
        prop_assert_eq!(&journal, &w.journal);

        let mut replayed = Market::new(params(), Time(1_000_000));
        let mut again = Vec::new();
        for entry in &journal {
            replayed.apply(entry.at, &entry.command, &mut again);
        }
        prop_assert_eq!(&again, &events);
        prop_assert_eq!(replayed.chain(), w.market.chain());
        let end = w.market.snapshot();
        prop_assert!(replayed.snapshot() == end, "another state");

        let (snapshot, done) = middle.unwrap();
        let mut resumed = Market::restore(&snapshot).unwrap();
        let mut tail = Vec::new();
        for entry in &journal[done..] {
            resumed.apply(entry.at, &entry.command, &mut tail);
        }
        prop_assert_eq!(&tail, &tail_events);
        prop_assert!(resumed.snapshot() == end, "a snapshot forgot something");
    }

    /// Two controllers of one owner, each with its last read state. Replies get lost, requests are repeated, and both act on
    /// stale versions.
    #[test]
    fn invariant_14_exact_once(tape in proptest::collection::vec(any::<u64>(), 1..40)) {
        let mut m = Market::new(params(), Time(1));
        let owner = OwnerKey([7; 16]);
        let mut read = [0u64; 2];
        let mut pending: [Option<Command>; 2] = [None, None];
        let mut placed: BTreeMap<u64, BidId> = BTreeMap::new();
        let mut now = 1;
        for number in tape {
            let who = usize::try_from(number % 2).unwrap();
            now += number / 2 % 3;
            match number / 6 % 5 {
                0 => read[who] = m.owner_version(TenantNo(1), owner),
                1 => pending[who] = None,
                2 => m = Market::restore(&m.snapshot()).unwrap(),
                _ => {
                    let version = read[who];
                    let command = pending[who].take().unwrap_or_else(|| place_at(version, owner, number / 30 % 3));
                    let Command::Place { request } = &command else { panic!("a request") };
                    let key = request.if_owner_version.unwrap();
                    let reply = m.apply(Time(now), &command, &mut Vec::new());
                    if let Reply::Bid { bid, owner_version, .. } = reply {
                        let first = *placed.entry(key).or_insert(bid);
                        prop_assert_eq!(first, bid, "two bids for one version");
                        if number / 90 % 2 == 0 {
                            read[who] = owner_version;
                        } else {
                            pending[who] = Some(command); // the reply was lost: the same again
                        }
                    }
                }
            }
        }
        prop_assert_eq!(m.bids().count(), placed.len());
    }
}

fn place_at(version: u64, owner: OwnerKey, variant: u64) -> Command {
    let mut key = [0; 16];
    key[0] = 1;
    key[8..].copy_from_slice(&version.to_le_bytes());
    Command::Place {
        request: Box::new(BidRequest {
            tenant: TenantNo(1),
            owner,
            if_owner_version: Some(version),
            key,
            body: variant,
            limit: Price::micros(12),
            quantity: 1,
            min_fill: 0,
            lease_ms: 900_000,
            expires_at: None,
            labels: Vec::new(),
        }),
    }
}

/// Old data must stay readable: the bytes of journal and snapshot are those of the first release.
#[test]
fn bytes_of_journal_and_snapshot_stay_the_same() {
    let mut w = World::new(true);
    let mut number = 1u64;
    for _ in 0..300 {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        w.step(number >> 11);
    }
    let mut bytes = Vec::new();
    w.journal.put(&mut bytes);
    assert_eq!((w.journal.len(), bytes.len()), (301, 6015));
    assert_eq!(
        hex(&Sha256::digest(&bytes)),
        "b4792eae2aa625f5e779845b435fc9154e2fd97b78686306686c5539b1590bbc"
    );
    assert_eq!(
        hex(&Sha256::digest(w.market.snapshot())),
        "3a3c4bf6cedc64e9f38747a9bb498aaf645c425f1b33f29533ea5a73459e9f3f"
    );
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
