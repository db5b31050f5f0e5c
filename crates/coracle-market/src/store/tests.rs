use coracle_testkit::eventually;
use coracle_testkit::postgres::Postgres;
use tokio::task::JoinSet;

use super::*;

/// Number of statements that wait for a lock.
async fn waiting(pool: &PgPool) -> i64 {
    const WAITING: &str = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    sqlx::query_scalar(WAITING).fetch_one(pool).await.unwrap()
}

/// The old writer has passed the check of its epoch when the new one takes over. The new one must recover what the old one then
/// commits; otherwise both use the same position of the journal, and the new writer fails for ever.
#[tokio::test]
async fn take_over_waits_for_append_of_old_writer() {
    let Some(postgres) = Postgres::start().unwrap() else { return };
    let at = StoreAt::Postgres(postgres.dsn());
    let (old, new) = (Store::open(&at).await.unwrap(), Store::open(&at).await.unwrap());
    let watch = PgPool::connect(&postgres.dsn()).await.unwrap();
    let epoch = old.take_over(0, 1, None).await.unwrap();

    // The append is blocked between its check and its commit.
    let mut gate = watch.begin().await.unwrap();
    sqlx::query("LOCK TABLE charges IN ACCESS EXCLUSIVE MODE").execute(&mut *gate).await.unwrap();
    let group = Group { market: 1, seq: 1, count: 1, body: vec![7], who: vec![0], chain: [1; 32] };
    let charge =
        ChargeRow { allocation: "a".into(), tenant: 1, starts: 0, ends: 1, price: 1, reason: "usage" };
    let made = Projections { calls: Vec::new(), charges: vec![charge] };
    let (mut appends, mut takers) = (JoinSet::new(), JoinSet::new());
    appends.spawn({
        let group = group.clone();
        async move { old.append(epoch, &[group], &made).await }
    });
    let stopped = async || (waiting(&watch).await == 1).then_some(());
    eventually("the append waits", stopped).await.unwrap();
    let taking = takers.spawn({
        let new = new.clone();
        async move { new.take_over(10, 1, None).await }
    });
    let both = async || (taking.is_finished() || waiting(&watch).await == 2).then_some(());
    eventually("the take-over waits or ends", both).await.unwrap();
    assert!(!taking.is_finished(), "it overtook an append that is going to be committed");

    gate.rollback().await.unwrap();
    appends.join_next().await.unwrap().unwrap().unwrap();
    assert_eq!(takers.join_next().await.unwrap().unwrap().unwrap(), epoch + 1);
    assert_eq!(new.groups(1, 1, 10).await.unwrap(), [group], "the new writer recovers it");
}
