//! Encodes changes as the messages of a batch. Pure.

use crate::abi::*;
use crate::attributes::Attributes;
use crate::expression::{expressions, key, key_type, verdict};
use crate::{Action, Base, Chain, ChainKind, Change, DataType, Element, Family, Hook, Set, SetKind, Table};

/// Sequence number of the messages that begin and end a batch. The sequence number of other messages is the index of their
/// change.
const MARK: u32 = u32::MAX;

/// Size of a message header, bytes (Linux, include/uapi/linux/netlink.h, `struct nlmsghdr`).
pub(crate) const HEADER: usize = 16;

/// Type and flags of a message (netlink(7)).
struct Request {
    kind: i32,
    flags: i32,
}

impl Request {
    /// Creates the object if it does not exist.
    fn add(kind: i32) -> Self {
        Self { kind, flags: libc::NLM_F_CREATE }
    }

    fn delete(kind: i32) -> Self {
        Self { kind, flags: 0 }
    }
}

/// Encodes a batch of these changes. The kernel acknowledges the last one when all are carried out.
pub(crate) fn batch(changes: &[Change]) -> Vec<u8> {
    let subsystem = libc::NFNL_SUBSYS_NFTABLES;
    let mark = |kind: i32| message(kind, 0, MARK, [0, 0, 0, low_byte(subsystem)], Attributes::default());
    let mut bytes = mark(libc::NFNL_MSG_BATCH_BEGIN);
    for (number, change) in (0_u32..).zip(changes) {
        let (request, attributes) = request(change, number);
        let is_last = changes.len() == index(number) + 1;
        let flags = request.flags | if is_last { libc::NLM_F_ACK } else { 0 };
        let kind = subsystem << u8::BITS | request.kind;
        bytes.extend(message(kind, flags, number, [family(change.table.family), 0, 0, 0], attributes));
    }
    bytes.extend(mark(libc::NFNL_MSG_BATCH_END));
    bytes
}

/// Encodes one message. `generic`: the netfilter header (Linux, include/uapi/linux/netfilter/nfnetlink.h, `struct nfgenmsg`).
fn message(kind: i32, flags: i32, number: u32, generic: [u8; 4], attributes: Attributes) -> Vec<u8> {
    let attributes = attributes.into_bytes();
    let length = u32::try_from(HEADER + generic.len() + attributes.len()).unwrap_or(u32::MAX);
    let word = |number: i32| u16::try_from(number).unwrap_or_default().to_ne_bytes();
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(word(kind));
    bytes.extend(word(flags | libc::NLM_F_REQUEST));
    bytes.extend(number.to_ne_bytes());
    bytes.extend([0; 4]);
    bytes.extend(generic);
    bytes.extend(attributes);
    bytes
}

fn request(change: &Change, number: u32) -> (Request, Attributes) {
    let name = change.table.name.as_str();
    let chain_of =
        |chain: &str| Attributes::default().string(NFTA_CHAIN_TABLE, name).string(NFTA_CHAIN_NAME, chain);
    match &change.action {
        Action::AddTable => (Request::add(libc::NFT_MSG_NEWTABLE), table(&change.table)),
        Action::DeleteTable => (Request::delete(libc::NFT_MSG_DELTABLE), table(&change.table)),
        Action::AddChain(Chain { name, base }) => {
            (Request::add(libc::NFT_MSG_NEWCHAIN), base.iter().fold(chain_of(name), base_chain))
        }
        Action::FlushChain(chain) => {
            let all = Attributes::default().string(NFTA_RULE_TABLE, name).string(NFTA_RULE_CHAIN, chain);
            (Request::delete(libc::NFT_MSG_DELRULE), all)
        }
        Action::DeleteChain(chain) => (Request::delete(libc::NFT_MSG_DELCHAIN), chain_of(chain)),
        Action::AddSet(one) => (Request::add(libc::NFT_MSG_NEWSET), set(name, one, number)),
        Action::AddElement(one) => (Request::add(libc::NFT_MSG_NEWSETELEM), element(name, one)),
        Action::DeleteElement(one) => (Request::delete(libc::NFT_MSG_DELSETELEM), element(name, one)),
        Action::AddRule(rule) => {
            let rule = Attributes::default()
                .string(NFTA_RULE_TABLE, name)
                .string(NFTA_RULE_CHAIN, &rule.chain)
                .nest(NFTA_RULE_EXPRESSIONS, expressions(&rule.statements));
            let flags = libc::NLM_F_CREATE | libc::NLM_F_APPEND;
            (Request { kind: libc::NFT_MSG_NEWRULE, flags }, rule)
        }
    }
}

fn table(table: &Table) -> Attributes {
    Attributes::default().string(NFTA_TABLE_NAME, &table.name)
}

fn base_chain(chain: Attributes, base: &Base) -> Attributes {
    let hook = Attributes::default()
        .number(NFTA_HOOK_HOOKNUM, hook(base.hook).cast_unsigned())
        .number(NFTA_HOOK_PRIORITY, base.priority.cast_unsigned());
    let kind = match base.kind {
        ChainKind::Filter => "filter",
        ChainKind::Nat => "nat",
    };
    chain
        .nest(NFTA_CHAIN_HOOK, hook)
        .number(NFTA_CHAIN_POLICY, libc::NF_ACCEPT.cast_unsigned())
        .string(NFTA_CHAIN_TYPE, kind)
}

/// Number of a hook. Bridge hooks have the numbers of IP hooks (Linux, include/uapi/linux/netfilter_bridge.h).
fn hook(hook: Hook) -> i32 {
    match hook {
        Hook::Prerouting => libc::NF_INET_PRE_ROUTING,
        Hook::Input => libc::NF_INET_LOCAL_IN,
        Hook::Forward => libc::NF_INET_FORWARD,
        Hook::Output => libc::NF_INET_LOCAL_OUT,
        Hook::Postrouting => libc::NF_INET_POST_ROUTING,
    }
}

/// `number` must be unique among the sets of the batch.
fn set(table: &str, set: &Set, number: u32) -> Attributes {
    let (key_type, key_length) = key_type(&set.key);
    let flags = match set.kind {
        SetKind::Members => 0,
        SetKind::Verdicts => libc::NFT_SET_MAP,
        SetKind::Connections { .. } => libc::NFT_SET_EVAL,
    };
    let made = Attributes::default()
        .string(NFTA_SET_TABLE, table)
        .string(NFTA_SET_NAME, &set.name)
        .number(NFTA_SET_FLAGS, flags.cast_unsigned())
        .number(NFTA_SET_KEY_TYPE, key_type)
        .number(NFTA_SET_KEY_LEN, key_length)
        .number(NFTA_SET_ID, number);
    let made = match set.key[..] {
        [DataType::InterfaceName] => made.bytes(NFTA_SET_USERDATA, &KEYS_IN_HOST_ORDER),
        _ => made,
    };
    match set.kind {
        SetKind::Members => made,
        SetKind::Verdicts => {
            made.number(NFTA_SET_DATA_TYPE, libc::NFT_DATA_VERDICT).number(NFTA_SET_DATA_LEN, 0)
        }
        SetKind::Connections { size } => {
            made.nest(NFTA_SET_DESC, Attributes::default().number(NFTA_SET_DESC_SIZE, size))
        }
    }
}

fn element(table: &str, element: &Element) -> Attributes {
    let one = Attributes::default().nest(NFTA_SET_ELEM_KEY, key(&element.key));
    let one =
        element.verdict.iter().fold(one, |one, leads_to| one.nest(NFTA_SET_ELEM_DATA, verdict(leads_to)));
    Attributes::default()
        .string(NFTA_SET_ELEM_LIST_TABLE, table)
        .string(NFTA_SET_ELEM_LIST_SET, &element.set)
        .nest(NFTA_SET_ELEM_LIST_ELEMENTS, Attributes::default().nest(NFTA_LIST_ELEM, one))
}

fn family(family: Family) -> u8 {
    low_byte(match family {
        Family::Ipv4 => libc::NFPROTO_IPV4,
        Family::Bridge => libc::NFPROTO_BRIDGE,
    })
}

fn low_byte(number: i32) -> u8 {
    u8::try_from(number).unwrap_or_default()
}

fn index(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
