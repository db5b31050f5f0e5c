//! Announcement of changed parameters. They take effect later, so that no price changes unexpectedly.

use coracle_auction::{Command, Params, Time};

use crate::error::RequestError;

/// Time between the announcement and the effect of a changed reserve, in milliseconds.
const ANNOUNCE_MS: u64 = 600_000;

/// Parameters of a market that are in force, and announced ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    pub(crate) params: Params,
    pub(crate) announced: Option<(Time, Params)>,
}

fn prices(params: &Params) -> [coracle_auction::Price; 3] {
    [params.reserve, params.cap, params.tick]
}

/// Commands that change a market to `wanted`. If a time is given, all parameters take effect then. Otherwise changed prices
/// take effect after their notice, and the rest at once. A request for the present prices withdraws an announcement. Pure.
///
/// # Errors
/// The reserve would change before its notice is over.
pub(crate) fn changes(
    known: &Known,
    wanted: Params,
    asked: Option<Time>,
    now: Time,
) -> Result<Vec<Command>, RequestError> {
    let notice = now.plus_ms(ANNOUNCE_MS);
    // The notice of an earlier announcement has begun already.
    let announced = known.announced.filter(|(_, later)| later.reserve == wanted.reserve);
    let soonest = match announced {
        _ if wanted.reserve == known.params.reserve => now,
        Some((at, _)) => at.min(notice),
        None => notice,
    };
    if let Some(asked) = asked {
        if asked < soonest && wanted.reserve != known.params.reserve {
            let told = format!(
                "effective_at must be at least {} minutes from now for another reserve: {} at the earliest",
                ANNOUNCE_MS / 60_000,
                soonest.0
            );
            return Err(RequestError::invalid_field("effective_at", told));
        }
        return Ok(vec![Command::Configure { params: wanted, effective_at: asked }]);
    }
    if prices(&wanted) == prices(&known.params) {
        return Ok(vec![Command::Configure { params: wanted, effective_at: now }]);
    }
    let [reserve, cap, tick] = prices(&known.params);
    let rest = Params { reserve, cap, tick, ..wanted };
    let same = announced.filter(|(_, later)| prices(later) == prices(&wanted));
    let effective_at = same.map_or(notice, |(at, _)| at);
    let mut commands = Vec::new();
    if rest != known.params {
        commands.push(Command::Configure { params: rest, effective_at: now });
    }
    commands.push(Command::Configure { params: wanted, effective_at });
    Ok(commands)
}

#[cfg(test)]
mod tests {
    use coracle_auction::Price;

    use super::*;

    const NOW: Time = Time(1_000_000_000);
    const NOTICE: u64 = ANNOUNCE_MS;

    fn params(reserve: i64, cap: i64, call_interval_ms: u64) -> Params {
        let dollars = |n: i64| Price::micros(n * 1_000_000);
        Params { call_interval_ms, ..Params::new(dollars(reserve), dollars(cap)) }
    }

    /// Description; announced and requested parameters, and the requested time; expected commands as `(from now, reserve,
    /// interval)`, or a refusal.
    type Case =
        (&'static str, Option<(Time, Params)>, Params, Option<Time>, Option<&'static [(u64, i64, u64)]>);

    #[test]
    fn changed_reserve_is_announced_before_it_applies() {
        let today = params(2, 8, 30_000);
        let later = |ms| Some(NOW.plus_ms(ms));
        let announced = |ms, reserve| Some((NOW.plus_ms(ms), params(reserve, 8, 30_000)));
        let table: [Case; 12] = [
            ("nothing changes", None, today, None, Some(&[(0, 2, 30_000)])),
            ("another interval: at once", None, params(2, 8, 1_000), None, Some(&[(0, 2, 1_000)])),
            ("an interval, later", None, params(2, 8, 1_000), later(7), Some(&[(7, 2, 1_000)])),
            ("a reserve: with notice", None, params(3, 8, 30_000), None, Some(&[(NOTICE, 3, 30_000)])),
            (
                "a reserve waits, the rest does not",
                None,
                params(3, 8, 1_000),
                None,
                Some(&[(0, 2, 1_000), (NOTICE, 3, 1_000)]),
            ),
            ("a lower reserve too", None, params(1, 8, 30_000), later(NOTICE - 1), None),
            ("without its notice", None, params(3, 8, 30_000), Some(Time(1)), None),
            ("with just its notice", None, params(3, 8, 30_000), later(NOTICE), Some(&[(NOTICE, 3, 30_000)])),
            ("announced before", announced(5, 3), params(3, 8, 30_000), None, Some(&[(5, 3, 30_000)])),
            ("sooner than announced", announced(5, 3), params(3, 8, 30_000), later(4), None),
            ("another than announced", announced(5, 3), params(4, 8, 30_000), later(5), None),
            ("taken back", announced(5, 3), today, None, Some(&[(0, 2, 30_000)])),
        ];
        for (why, announced, wanted, asked, want) in table {
            let got = changes(&Known { params: today, announced }, wanted, asked, NOW);
            match want {
                None => assert_eq!(got.unwrap_err().field, Some("effective_at"), "{why}"),
                Some(want) => {
                    let command = |(ms, reserve, interval): &(u64, i64, u64)| Command::Configure {
                        params: params(*reserve, 8, *interval),
                        effective_at: NOW.plus_ms(*ms),
                    };
                    assert_eq!(got.unwrap(), want.iter().map(command).collect::<Vec<_>>(), "{why}");
                }
            }
        }
    }

    #[test]
    fn changed_cap_waits_for_notice_unless_effective_at_is_set() {
        let known = Known { params: params(2, 8, 30_000), announced: None };
        let from = |asked| changes(&known, params(2, 9, 30_000), asked, NOW).unwrap();
        let at = |effective_at| vec![Command::Configure { params: params(2, 9, 30_000), effective_at }];
        assert_eq!(from(None), at(NOW.plus_ms(NOTICE)));
        assert_eq!(from(Some(NOW)), at(NOW));
    }
}
