//! Applies batches in a network namespace, and checks the kernel's state by nft(8).
#![allow(clippy::unwrap_used, reason = "a test reports by panicking")]

use std::net::Ipv4Addr;
use std::process::Command;

use coracle_nftables::{
    Action, Base, Chain, ChainKind, Change, Connection, DataType, Element, Family, Field, Hook,
    NftablesError, Relation, Set, SetKind, Statement, Table, Value, Verdict,
};
use coracle_testkit::{netns, tools};

fn list_ruleset() -> String {
    let output = Command::new("nft").args(["list", "ruleset"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

async fn apply(changes: Vec<Change>) -> Result<(), NftablesError> {
    Connection::open().unwrap().apply(changes).await
}

fn table() -> Table {
    Table::new(Family::Ipv4, "test")
}

fn add_table() -> Change {
    table().change(Action::AddTable)
}

fn base_chain(kind: ChainKind, hook: Hook) -> Change {
    let base = Base { kind, hook, priority: 10 };
    table().change(Action::AddChain(Chain { name: "base".to_owned(), base: Some(base) }))
}

fn set(name: &str, key: &[DataType], kind: SetKind) -> Change {
    table().change(Action::AddSet(Set { name: name.to_owned(), key: key.to_vec(), kind }))
}

fn compare(field: Field, value: Value) -> Statement {
    Statement::Compare(field, Relation::Is, value)
}

/// Returns the rule as nft shows it, in a table with a chain `other` and sets of each kind.
async fn show_rule(kind: ChainKind, hook: Hook, statements: Vec<Statement>) -> String {
    let port = [DataType::InetProtocol, DataType::InetService];
    let changes = vec![
        add_table(),
        table().change(Action::DeleteTable),
        add_table(),
        set("hosts", &[DataType::Ipv4Address], SetKind::Members),
        set("ways", &port, SetKind::Verdicts),
        set("counted", &[DataType::Ipv4Address], SetKind::Connections { size: 9 }),
        table().change(Action::AddChain(Chain { name: "other".to_owned(), base: None })),
        base_chain(kind, hook),
        table().rule("base", statements),
    ];
    apply(changes).await.unwrap();
    let all = list_ruleset();
    let (_, rules) = all.split_once("policy accept;\n").unwrap();
    rules.lines().next().unwrap().trim().to_owned()
}

#[test]
fn statements_are_those_that_nft_shows() {
    if tools::require(["nft"]).is_none() {
        return;
    }
    let host = Ipv4Addr::new(10, 1, 2, 3);
    let address = || Value::Ipv4Address(host);
    let within = |relation, prefix| Statement::Within(Field::Ipv4Source, relation, host, prefix);
    let tcp = || compare(Field::InetProtocol, Value::InetProtocol(6));
    let port = || compare(Field::DestinationPort, Value::InetService(443));
    let member = |relation| Statement::Member(Field::Ipv4Destination, relation, "hosts".to_owned());
    let ways = vec![Field::InetProtocol, Field::DestinationPort];
    let filter = vec![
        (vec![compare(Field::Ipv4Source, address())], "ip saddr 10.1.2.3"),
        (
            vec![Statement::Compare(Field::Ipv4Destination, Relation::IsNot, address())],
            "ip daddr != 10.1.2.3",
        ),
        (vec![within(Relation::Is, 20)], "ip saddr 10.1.0.0/20"),
        (vec![within(Relation::IsNot, 32)], "ip saddr != 10.1.2.3"),
        (vec![tcp(), port()], "tcp dport 443"),
        (
            vec![
                compare(Field::InetProtocol, Value::InetProtocol(1)),
                compare(Field::IcmpType, Value::IcmpType(8)),
            ],
            "icmp type echo-request",
        ),
        (vec![compare(Field::InputInterface, Value::InterfaceName("lo".to_owned()))], "iifname \"lo\""),
        (vec![compare(Field::InputGroup, Value::Number(77))], "iifgroup 77"),
        (vec![Statement::AnyBit(Field::ConnectionState, 6)], "ct state established,related"),
        (vec![Statement::AnyBit(Field::ConnectionStatus, 0x20)], "ct status dnat"),
        (
            vec![compare(Field::OriginalDestination, address()), tcp()],
            "ct original ip daddr 10.1.2.3 meta l4proto tcp",
        ),
        (
            vec![tcp(), compare(Field::OriginalDestinationPort, Value::InetService(443))],
            "meta l4proto tcp ct original proto-dst 443",
        ),
        (vec![compare(Field::DestinationType, Value::Number(2))], "fib daddr type local"),
        (vec![member(Relation::Is)], "ip daddr @hosts"),
        (vec![member(Relation::IsNot)], "ip daddr != @hosts"),
        (vec![Statement::Lookup(ways, "ways".to_owned())], "meta l4proto . th dport vmap @ways"),
        (
            vec![Statement::LimitConnections { key: Field::Ipv4Source, set: "counted".to_owned(), above: 5 }],
            "add @counted { ip saddr ct count over 5 }",
        ),
        (vec![Statement::Verdict(Verdict::Accept)], "accept"),
        (vec![Statement::Verdict(Verdict::Drop)], "drop"),
        (vec![Statement::Verdict(Verdict::Jump("other".to_owned()))], "jump other"),
        (vec![Statement::Verdict(Verdict::Goto("other".to_owned()))], "goto other"),
    ];
    let nat = [
        (
            Hook::Output,
            vec![tcp(), Statement::DestinationNat(host, 80)],
            "meta l4proto tcp dnat to 10.1.2.3:80",
        ),
        (Hook::Postrouting, vec![Statement::Masquerade], "masquerade"),
    ];
    netns::run(|| async move {
        for hook in [Hook::Prerouting, Hook::Input, Hook::Forward, Hook::Output, Hook::Postrouting] {
            assert_eq!(show_rule(ChainKind::Filter, hook, vec![port()]).await, "th dport 443", "{hook:?}");
            let name = format!("hook {hook:?}").to_lowercase();
            assert!(list_ruleset().contains(&name), "{name}");
        }
        for (statements, want) in filter {
            assert_eq!(show_rule(ChainKind::Filter, Hook::Input, statements).await, want);
        }
        for (hook, statements, want) in nat {
            assert_eq!(show_rule(ChainKind::Nat, hook, statements).await, want);
        }
        apply(vec![table().change(Action::DeleteTable)]).await.unwrap();
    });
}

#[test]
fn refused_change_is_named_and_none_is_carried_out() {
    if tools::require(["nft"]).is_none() {
        return;
    }
    netns::run(|| async {
        let key = vec![Value::Ipv4Address(Ipv4Addr::LOCALHOST)];
        let element = Element { set: "missing".to_owned(), key, verdict: None };
        let changes = vec![add_table(), table().change(Action::AddElement(element)), add_table()];
        let refused = apply(changes).await.unwrap_err();
        assert_eq!(refused.to_string(), "add element ip test missing { 127.0.0.1 }");
        let NftablesError::Refused { source, .. } = refused else { unreachable!("a change is refused") };
        assert_eq!(source.raw_os_error(), Some(libc::ENOENT));
        assert_eq!(list_ruleset(), "");
    });
}

#[test]
fn set_elements_are_added_and_deleted() {
    if tools::require(["nft"]).is_none() {
        return;
    }
    netns::run(|| async {
        let way = |port| Element {
            set: "ways".to_owned(),
            key: vec![Value::InetProtocol(17), Value::InetService(port)],
            verdict: Some(Verdict::Drop),
        };
        let key = [DataType::InetProtocol, DataType::InetService];
        let add = |port| table().change(Action::AddElement(way(port)));
        apply(vec![add_table(), set("ways", &key, SetKind::Verdicts), add(53), add(67)]).await.unwrap();
        assert!(
            list_ruleset().contains("elements = { udp . 53 : drop,\n\t\t\t     udp . 67 : drop }"),
            "{}",
            list_ruleset()
        );
        let delete = |port| table().change(Action::DeleteElement(way(port)));
        apply(vec![add(53), delete(53)]).await.unwrap();
        assert!(list_ruleset().contains("elements = { udp . 67 : drop }"), "{}", list_ruleset());
        apply(vec![delete(53)]).await.unwrap_err();
        apply(vec![table().change(Action::DeleteTable)]).await.unwrap();
    });
}

/// As many rules as a node with some thousand guests has, which exceeds the default size of a socket buffer.
#[test]
fn large_batch_is_one_transaction() {
    if tools::require(["nft"]).is_none() {
        return;
    }
    netns::run(|| async {
        let rules = |count: u32| {
            let rule = |number: u32| {
                let from = compare(Field::Ipv4Source, Value::Ipv4Address(number.into()));
                table().rule("base", vec![from, Statement::Verdict(Verdict::Drop)])
            };
            let chain = base_chain(ChainKind::Filter, Hook::Input);
            [add_table(), chain].into_iter().chain((1..=count).map(rule)).collect::<Vec<_>>()
        };
        apply(rules(50_000)).await.unwrap();
        assert_eq!(list_ruleset().lines().filter(|line| line.ends_with(" drop")).count(), 50_000);
        apply(vec![table().change(Action::DeleteTable)]).await.unwrap();
        // A refused change at the end.
        let mut refused = rules(50_000);
        refused.push(table().rule("missing", vec![]));
        apply(refused).await.unwrap_err();
        assert_eq!(list_ruleset(), "");
    });
}

#[test]
fn callers_of_one_connection_get_their_own_answers() {
    netns::run(|| async {
        let connection = Connection::open().unwrap();
        let mut callers = tokio::task::JoinSet::new();
        for number in 0_u8..8 {
            let (connection, table) = (connection.clone(), Table::new(Family::Ipv4, &format!("of_{number}")));
            callers.spawn(async move {
                for _ in 0..50 {
                    connection.apply(vec![table.change(Action::AddTable)]).await.unwrap();
                    let missing = table.change(Action::DeleteChain("missing".to_owned()));
                    let refused = connection.apply(vec![missing.clone()]).await.unwrap_err();
                    assert_eq!(refused.to_string(), missing.to_string());
                    connection.apply(vec![table.change(Action::DeleteTable)]).await.unwrap();
                }
            });
        }
        callers.join_all().await;
    });
}
